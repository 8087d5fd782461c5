"""What the person sees: one small interface, plain lines for files and pipes, and the choice between the displays."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TextIO

from mlxdist.coordinator.report.eta import Pace
from mlxdist.coordinator.report.format import (
    StepReport,
    clock_phrase,
    duration_phrase,
    left_phrase,
    node_phrase,
    numbers_phrase,
    rate_phrase,
    step_phrase,
    val_phrase,
)

_TICK_SECONDS = 0.5


class Display(Protocol):
    """Whatever shows a run to a person. The methods may be called from several threads."""

    def stage(self, message: str, progress: float | None) -> None:
        """What the run is busy with; `progress` in [0, 1] where it is known."""

    def step(self, report: StepReport) -> None:
        """One finished step."""

    def val(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """One finished evaluation."""

    def node(self, name: str, state: str, message: str, *, stays: bool = False) -> None:
        """A node's new state; `stays` for what a person should find again: its loss and its return."""

    def pause(self, sentence: str, *, over: bool) -> None:
        """The run waits for nodes, or goes on."""

    def node_speed(self, name: str, tokens_per_second: float) -> None:
        """A node's measured speed."""

    def say(self, sentence: str) -> None:
        """A sentence that stays."""

    def end(self, sentence: str) -> None:
        """The run is over: the closing sentence."""


class PlainDisplay:
    """Lines with the time since the start in front.

    A step is told every `report_every` steps and when nothing was said for `quiet_seconds`; so is, by `tick`, what is
    still going on. After `patient_after` seconds a line every `patient_seconds` is enough: a night's log stays short.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        report_every: int,
        clock: Callable[[], float],
        quiet_seconds: float = 4.5,
        patient_after: float = 600.0,
        patient_seconds: float = 60.0,
    ) -> None:
        self._stream = stream
        self._report_every = report_every
        self._clock = clock
        self._quiet_seconds = quiet_seconds
        self._patient_after = patient_after
        self._patient_seconds = patient_seconds
        self._pace = Pace(clock)
        self._began = self._last_line = self._busy_since = clock()
        self._busy = self._next = "starting"  # what it does, and what after an evaluation
        self._ended = False
        self._progress: float | None = None
        self._speeds: dict[str, float] = {}
        self._known: set[str] = set()  # the nodes that were ready once
        self._lock = threading.RLock()

    def stage(self, message: str, progress: float | None) -> None:
        """Tell a new stage at once; its progress comes with the heartbeat."""
        with self._lock:
            if message != self._busy:
                self._set_busy(message)
                self.say(message)
            self._progress = progress

    def step(self, report: StepReport) -> None:
        """Tell a step if its turn has come, or if it was quiet for long."""
        with self._lock:
            self._pace.step(report)
            self._next = "finishing" if report.step == report.total_steps else "working on the next step"
            self._set_busy(self._next)
            due = report.step % self._report_every == 0 or report.step in (1, report.total_steps)
            if due or self._quiet():
                left = left_phrase(self._pace.seconds_left())
                self.say(f"{step_phrase(report)}: {numbers_phrase(report)}{left}")

    def val(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """Tell an evaluation."""
        with self._lock:
            self._set_busy(self._next)
            self.say(val_phrase(step, loss, metrics))

    def node(self, name: str, state: str, message: str, *, stays: bool = False) -> None:
        """Tell a node's loss and return, and how it comes up at the start; not the coming and going of work."""
        coming = state not in ("busy", "ready") and (name not in self._known)
        if stays or coming:
            self.say(node_phrase(name, state, message))
        if state == "ready":
            self._known.add(name)

    def pause(self, sentence: str, *, over: bool) -> None:
        """Tell the pause and its end; the heartbeat goes on in between."""
        with self._lock:
            self._set_busy("working on the next step" if over else "waiting for nodes")
            self.say(sentence)

    def node_speed(self, name: str, tokens_per_second: float) -> None:
        """Speeds are told with the heartbeat of a long step only."""
        with self._lock:
            self._speeds[name] = tokens_per_second

    def say(self, sentence: str) -> None:
        """Write one line."""
        with self._lock:
            self._last_line = self._clock()
            self._stream.write(f"{clock_phrase(self._last_line - self._began)}  {sentence}\n")
            self._stream.flush()

    def end(self, sentence: str) -> None:
        """Write the closing line; the heartbeat falls silent."""
        with self._lock:
            self.say(sentence)
            self._ended = True

    def tick(self) -> None:
        """Called often: writes the heartbeat when nothing was said for long."""
        with self._lock:
            if self._quiet() and not self._ended:
                done = f" ({self._progress:.0%})" if self._progress is not None else ""
                rates = "".join(f"; {name} {rate_phrase(speed)}" for name, speed in self._speeds.items())
                since = duration_phrase(self._clock() - self._busy_since)
                self.say(f"… {self._busy}{done}, {since} so far{rates}")

    def _quiet(self) -> bool:
        now = self._clock()
        patient = now - self._began >= self._patient_after
        return now - self._last_line >= (self._patient_seconds if patient else self._quiet_seconds)

    def _set_busy(self, busy: str) -> None:
        self._busy, self._busy_since, self._progress = busy, self._clock(), None


class Unbreakable:
    """A text stream that outlives its reader: when the terminal or pipe is gone, writing does nothing.

    A run must not end because the window that watched it was closed; its events are in `metrics.jsonl`.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding

    def write(self, text: str) -> int:
        """Write, with question marks for what the terminal's encoding lacks, or do nothing."""
        try:
            known = self._stream.encoding or "utf-8"
            return self._stream.write(text.encode(known, "replace").decode(known))
        except OSError:
            return len(text)

    def flush(self) -> None:
        """Flush, or do nothing."""
        try:
            self._stream.flush()
        except OSError:
            return

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The stream's descriptor, by which the width is found."""
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
    """Show a run on `stream` while the block lasts: live on a terminal, plain lines otherwise.

    `environ` decides with the stream: TERM=dumb means plain lines, NO_COLOR no colours.
    """
    steady: TextIO = Unbreakable(stream)  # type: ignore[assignment]  # the part of TextIO that the displays use
    if stream.isatty() and environ.get("TERM", "") not in ("", "dumb", "unknown"):
        from mlxdist.coordinator.report.live import live_display

        with live_display(steady, title=title, environ=environ, clock=clock) as live:
            yield live
        return
    plain = PlainDisplay(steady, report_every=report_every, clock=clock)
    with _ticking(plain.tick):
        yield plain


@contextmanager
def _ticking(tick: Callable[[], None]) -> Iterator[None]:
    """Call `tick` about twice a second on a thread of its own while the block lasts."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(_TICK_SECONDS):
            tick()

    thread = threading.Thread(target=run, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
