"""The live display of a terminal: a bar, the last step's numbers, what is going on, one line per node.

my-rows  ━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━  step 45 of 100
loss 1.2345, 812 tokens/s, 2.4 s a step, about 2 min 12 s left
working on step 46, 1.2 s
  mini-1  busy     410 tokens/s
  mini-2  loading  reading the model
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mlxdist.coordinator.report.eta import Pace
from mlxdist.coordinator.report.format import (
    StepReport,
    duration_phrase,
    left_phrase,
    node_phrase,
    numbers_phrase,
    rate_phrase,
    step_phrase,
    val_phrase,
)

_STYLES = {"ready": "green", "busy": "green", "suspect": "yellow", "dead": "red", "left": "red", "refused": "red"}


@dataclass(frozen=True, slots=True)
class _Node:
    state: str = ""
    message: str = ""
    tokens_per_second: float | None = None


class LiveDisplay:
    """Keeps what is shown and draws it when asked; sentences that stay go above the drawing."""

    def __init__(self, console: Console, *, title: str, clock: Callable[[], float]) -> None:
        self._console = console
        self._title = title
        self._clock = clock
        self._pace = Pace(clock)
        self._report: StepReport | None = None
        self._busy, self._busy_since = "starting", clock()
        self._next = "starting"  # what it does after an evaluation
        self._progress: float | None = None
        self._nodes: dict[str, _Node] = {}
        self._ended = False
        self._lock = threading.RLock()

    def stage(self, message: str, progress: float | None) -> None:
        """Show the stage until the next one or the next step."""
        with self._lock:
            if message != self._busy:
                self._busy, self._busy_since = message, self._clock()
            self._progress = progress

    def step(self, report: StepReport) -> None:
        """Show the step's numbers and move the bar."""
        with self._lock:
            self._pace.step(report)
            self._report, self._progress = report, None
            ended = report.step == report.total_steps
            self._busy = self._next = "finishing" if ended else f"working on step {report.step + 1}"
            self._busy_since = self._clock()

    def val(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """Leave the evaluation's line above the drawing."""
        with self._lock:
            self._busy, self._busy_since = self._next, self._clock()
        self.say(val_phrase(step, loss, metrics))

    def node(self, name: str, state: str, message: str, *, stays: bool = False) -> None:
        """Show the node's line; its loss and its return also leave a line above."""
        with self._lock:
            self._nodes[name] = replace(self._nodes.get(name, _Node()), state=state, message=message)
        if stays:
            self.say(node_phrase(name, state, message))

    def pause(self, sentence: str, *, over: bool) -> None:
        """Show that the run waits, and leave a line above at both ends."""
        self.stage("working on the step" if over else "waiting for nodes", None)
        self.say(sentence)

    def node_speed(self, name: str, tokens_per_second: float) -> None:
        """Show the node's speed."""
        with self._lock:
            self._nodes[name] = replace(self._nodes.get(name, _Node()), tokens_per_second=tokens_per_second)

    def say(self, sentence: str) -> None:
        """Leave a sentence above the drawing."""
        self._console.print(sentence, markup=False, highlight=False)

    def end(self, sentence: str) -> None:
        """Leave the last step's line and the closing sentence in the drawing's place."""
        with self._lock:
            self._ended = True
            last = self._report
        if last is not None:
            self.say(f"{step_phrase(last)}: {numbers_phrase(last)}")
        self.say(sentence)

    def draw(self) -> RenderableType:
        """The drawing as of now."""
        with self._lock:
            if self._ended:
                return Group()
            lines: list[RenderableType] = [self._bar()]
            if self._report is not None:
                lines.append(_line(Text(numbers_phrase(self._report))))
            lines.append(self._busy_line())
            lines += self._node_lines(max(self._console.height - len(lines) - 2, 1))
            return Group(*lines)

    def _bar(self) -> RenderableType:
        report = self._report
        if report is not None:
            done = None if report.total_steps is None else report.step / report.total_steps
            where = step_phrase(report)
        else:
            done = self._progress
            where = "" if done is None else f"{done:.0%}"
        bar = ProgressBar(total=None if done is None else 1.0, completed=done or 0.0, pulse=done is None)
        grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
        grid.add_column(no_wrap=True, overflow="ellipsis", max_width=max(self._console.width // 4, 8))
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        grid.add_row(Text(self._title, style="bold"), bar, Text(where))
        return grid

    def _busy_line(self) -> RenderableType:
        since = duration_phrase(self._clock() - self._busy_since)
        within = self._report is not None and self._progress is not None  # before the steps the bar shows it
        inside = f"{self._progress:.0%}, {since}" if within else since
        return _line(Text(f"{self._busy} ({inside}){left_phrase(self._pace.seconds_left())}", style="dim"))

    def _node_lines(self, room: int) -> list[RenderableType]:
        """One line per node, and what does not fit in `room` lines as a number."""
        nodes = list(self._nodes.items())
        shown = nodes if len(nodes) <= room else nodes[: room - 1]
        wide = min(max((len(name) for name, _ in nodes), default=0), max(self._console.width // 3, 8))
        lines: list[RenderableType] = []
        for name, node in shown:
            fitting = name if len(name) <= wide else name[: wide - 1] + "…"
            rate = "" if node.tokens_per_second is None else rate_phrase(node.tokens_per_second)
            rest = "  ".join(part for part in (rate, node.message) if part)
            lines.append(
                _line(
                    Text.assemble(
                        f"  {fitting:<{wide}}  ", (f"{node.state:<10}", _STYLES.get(node.state, "")), f"  {rest}"
                    )
                )
            )
        if len(shown) < len(nodes):
            lines.append(_line(Text(f"  and {len(nodes) - len(shown)} more")))
        return lines


@contextmanager
def live_display(
    stream: TextIO, *, title: str, environ: Mapping[str, str], clock: Callable[[], float]
) -> Iterator[LiveDisplay]:
    """Draw on a terminal four times a second while the block lasts; only the sentences stay."""
    console = Console(file=stream, force_terminal=True, highlight=False, _environ=environ)
    display = LiveDisplay(console, title=title, clock=clock)
    with Live(get_renderable=display.draw, console=console, refresh_per_second=4, transient=True):
        yield display


def _line(text: Text) -> Text:
    """One line, cut with an ellipsis where the terminal is too narrow."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
