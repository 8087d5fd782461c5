"""The person's view of a run: one small interface, and the choice between plain lines and a live display."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TextIO

from mlxdist.coordinator.report.picture import Event
from mlxdist.coordinator.report.plain import PlainDisplay
from mlxdist.coordinator.report.ticking import ticking

_TICK_SECONDS = 0.5


class Display(Protocol):
    """Shows a run to a person by its events. The methods may be called from several threads."""

    def take(self, event: Event) -> None:
        """Shows one event, as `metrics.jsonl` has it."""

    def recall(self, events: Iterable[Event], now: float | None = None, shown: int = 0) -> None:
        """Takes events that were told before, in place of all that it has taken.

        `now`: seconds since 1970 by the clock of the run's host; None: the last of them is told just now. `shown`: so
        many of their last sentences are said again.
        """

    def stage(self, message: str, progress: float | None) -> None:
        """Shows what the run is busy with, and its `progress` in [0, 1] more often than events tell it."""

    def say(self, sentence: str) -> None:
        """Shows a sentence that stays."""

    def end(self, sentence: str) -> None:
        """Shows the closing sentence; nothing comes after it."""


class Unbreakable:
    """A text stream that does not fail with its reader: when the terminal or pipe is gone, writing does nothing.

    A run must not end because the window that showed it was closed; its events are in `metrics.jsonl`.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding

    def write(self, text: str) -> int:
        """Writes, with question marks for what the terminal's encoding lacks, or does nothing."""
        try:
            known = self._stream.encoding or "utf-8"
            return self._stream.write(text.encode(known, "replace").decode(known))
        except OSError:
            return len(text)

    def flush(self) -> None:
        """Flushes, or does nothing."""
        try:
            self._stream.flush()
        except OSError:
            return

    def isatty(self) -> bool:
        """Returns true for a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Returns the stream's descriptor, by which the width is found."""
        return self._stream.fileno()


@contextmanager
def open_display(
    stream: TextIO,
    *,
    title: str,
    report_every: int,
    environ: Mapping[str, str],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Display]:
    """Shows a run on `stream` while the block lasts: live on a terminal, in plain lines otherwise.

    `environ` decides with the stream: TERM=dumb means plain lines, NO_COLOR no colors.
    """
    steady: TextIO = Unbreakable(stream)  # type: ignore[assignment]  # the part of TextIO that the displays use
    if stream.isatty() and environ.get("TERM", "") not in ("", "dumb", "unknown"):
        from mlxdist.coordinator.report.live import live_display

        with live_display(steady, title=title, environ=environ, clock=clock) as live:
            yield live
        return
    plain = PlainDisplay(steady, report_every=report_every, clock=clock)
    with ticking(plain.tick, _TICK_SECONDS):
        yield plain
