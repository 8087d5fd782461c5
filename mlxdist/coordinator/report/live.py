"""The live display of a terminal: the sentences that stay scroll up, and the picture of the run is below them.

The screen is not taken over: what was said before, and is said here, can be scrolled back to, copied, and wraps.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mlxdist.coordinator.report.drawing import draw
from mlxdist.coordinator.report.format import clock_phrase
from mlxdist.coordinator.report.picture import Event, Picture, news_in, recalled
from mlxdist.coordinator.report.ticking import ticking

DRAW_SECONDS = 0.25
KEPT = 100  # sentences that are written again when the size of the terminal changes, as many as it has room for


class LiveDisplay:
    """Keeps what is shown and draws it when asked; sentences that stay go above the drawing."""

    def __init__(self, console: Console, *, title: str, clock: Callable[[], float]) -> None:
        self._console, self._title, self._clock = console, title, clock
        self._picture = Picture()
        self._seen = clock()  # when the last event was told
        self._said: deque[Table] = deque(maxlen=KEPT)
        self._ended = False
        self._lock = threading.RLock()

    def recall(self, events: Iterable[Event], now: float | None = None, shown: int = 0) -> None:
        """Takes events that were told before, in place of all that it has taken; see Display."""
        with self._lock:
            self._picture, again = recalled(events, shown)
            self._seen = self._clock() - self._picture.since(now)
            said = [_hanging(clock_phrase(seconds), sentence) for seconds, sentence in again]
            self._said.extend(said)
        for each in said:
            self._console.print(each)

    def take(self, event: Event) -> None:
        """Shows one event; those that a person should find again leave a line above the drawing."""
        with self._lock:
            self._picture.take(event)
            self._seen = self._clock()
        if (sentence := news_in(event)) is not None and event.get("event") != "done":
            self.say(sentence)

    def stage(self, message: str, progress: float | None) -> None:
        """Shows how far the run is in what it is busy with."""
        with self._lock:
            self._picture.stage(message, progress)

    def say(self, sentence: str) -> None:
        """Leaves a sentence above the drawing, with its time in the run."""
        with self._lock:
            said = _hanging(clock_phrase(self._now()), sentence)
            self._said.append(said)
        self._console.print(said)

    def end(self, sentence: str) -> None:
        """Leaves the last picture and the closing sentence in the drawing's place."""
        with self._lock:
            self._ended = True
            if self._picture.ending:
                self._picture.busy = ""  # what it did after its last event
            last = self._drawn() if self._picture.last is not None else Group()
        self._console.print(last)  # not under the lock, which the drawing thread may wait for with the terminal's
        self.say(sentence)

    def draw(self) -> RenderableType:
        """Returns the drawing as of now: nothing after the end."""
        with self._lock:
            return Group() if self._ended else Group(Text(), self._drawn())

    def say_again(self) -> None:
        """Writes the last sentences again, as many as there is room for above the drawing."""
        with self._lock:
            size = self._console.size
            room = size.height - len(self._console.render_lines(self.draw(), pad=False)) - 1
            fitting: deque[Table] = deque()
            for said in reversed(self._said):
                room -= len(self._console.render_lines(said, pad=False))
                if room < 0:
                    break
                fitting.appendleft(said)
        for said in fitting:
            self._console.print(said)

    def _drawn(self) -> RenderableType:
        size, ascii_only = self._console.size, self._console.options.ascii_only
        height = max(size.height - 2, 1)
        return draw(self._picture, self._title, self._now(), width=size.width, height=height, ascii_only=ascii_only)

    def _now(self) -> float:
        """The seconds of the run."""
        return self._picture.at + self._clock() - self._seen


def _hanging(time: str, sentence: str) -> Table:
    """Returns a sentence beside its time; where it wraps, its lines stand under each other."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(time), Text(sentence))
    return grid


@contextmanager
def live_display(
    stream: TextIO, *, title: str, environ: Mapping[str, str], clock: Callable[[], float]
) -> Iterator[LiveDisplay]:
    """Draws on a terminal four times a second while the block lasts; the sentences and the last picture stay.

    After a change of the terminal's size it is cleared: lines that it has wrapped itself cannot be drawn over.
    """
    console = Console(file=stream, force_terminal=True, highlight=False, _environ=environ)
    display = LiveDisplay(console, title=title, clock=clock)
    size, live = console.size, _live(console, display)

    def refresh() -> None:
        nonlocal size, live
        if console.size == size:
            live.refresh()
            return
        size = console.size
        live.stop()
        console.clear()
        display.say_again()
        live = _live(console, display)  # another one, as the old one would erase as many lines as it had drawn
        live.start(refresh=True)

    live.start(refresh=True)
    try:
        with ticking(refresh, DRAW_SECONDS):
            yield display
    finally:
        live.stop()


def _live(console: Console, display: LiveDisplay) -> Live:
    return Live(get_renderable=display.draw, console=console, auto_refresh=False, transient=True)
