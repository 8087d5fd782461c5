"""The live display of a terminal: a bar, the last step's numbers, the work in hand, one line per node.

my-rows ━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━ step 45 of 100
loss 1.2345, 812 tokens/s, 2.4 s a step
working on step 46 (1.2 s), about 2 min 12 s left
  mini-1  busy        410 tokens/s
  mini-2  loading     reading the model
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, TextColumn
from rich.table import Column
from rich.text import Text

from mlxdist.coordinator.report.eta import new_progress, seconds_left
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


class LiveDisplay:
    """Keeps what is shown and draws it when asked; sentences that stay go above the drawing."""

    def __init__(self, console: Console, *, title: str, clock: Callable[[], float]) -> None:
        self._console = console
        self._title = title
        self._clock = clock
        title_column = Column(no_wrap=True, overflow="ellipsis", max_width=max(console.width // 4, 8))
        self._bar = new_progress(
            clock,
            TextColumn("{task.description}", style="bold", markup=False, table_column=title_column),
            BarColumn(None, table_column=Column(ratio=1)),
            TextColumn("{task.fields[where]}", markup=False, justify="right"),
            console=console,
        )
        self._report: StepReport | None = None
        self._busy, self._busy_since = "starting", clock()
        self._next = "starting"  # what it does after an evaluation
        self._progress: float | None = None  # of the stage
        self._nodes: dict[str, tuple[str, str]] = {}  # state and message
        self._ended = False
        self._lock = threading.RLock()
        self._new_bar(None)

    def stage(self, message: str, progress: float | None) -> None:
        """Shows the stage until the next one or the next step; before the first step the bar is the stage's."""
        with self._lock:
            if message != self._busy:
                self._busy, self._busy_since = message, self._clock()
            if self._report is None and (progress is None) != (self._progress is None):
                self._new_bar(None if progress is None else 1.0)
            self._progress = progress
            if self._report is None and progress is not None:
                self._move_bar(progress, f"{progress:.0%}")

    def step(self, report: StepReport) -> None:
        """Shows the step's numbers and moves the bar."""
        with self._lock:
            if self._report is None:
                self._new_bar(report.total_steps)
            self._report, self._progress = report, None
            self._move_bar(report.step, step_phrase(report))
            ended = report.step == report.total_steps
            self._busy = self._next = "finishing" if ended else f"working on step {report.step + 1}"
            self._busy_since = self._clock()

    def val(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """Leaves the evaluation's line above the drawing."""
        with self._lock:
            self._busy, self._busy_since = self._next, self._clock()
        self.say(val_phrase(step, loss, metrics))

    def node(self, name: str, state: str, message: str, *, stays: bool = False) -> None:
        """Shows the node's line; its loss and its return also leave a line above."""
        with self._lock:
            self._nodes[name] = (state, message)
        if stays:
            self.say(node_phrase(name, state, message))

    def pause(self, sentence: str, *, over: bool) -> None:
        """Shows that the run waits, and leaves a line above at both ends."""
        self.stage("working on the step" if over else "waiting for nodes", None)
        self.say(sentence)

    def say(self, sentence: str) -> None:
        """Leaves a sentence above the drawing."""
        self._console.print(sentence, markup=False, highlight=False)

    def end(self, sentence: str) -> None:
        """Leaves the last step's line and the closing sentence in the drawing's place."""
        with self._lock:
            self._ended = True
            last = self._report
        if last is not None:
            self.say(f"{step_phrase(last)}: {numbers_phrase(last)}")
        self.say(sentence)

    def draw(self) -> RenderableType:
        """Returns the drawing as of now."""
        with self._lock:
            if self._ended:
                return Group()
            lines: list[RenderableType] = [self._bar.get_renderable()]
            if self._report is not None:
                lines.append(_line(Text(numbers_phrase(self._report))))
            lines.append(self._busy_line())
            lines += self._node_lines(max(self._console.height - len(lines) - 2, 1))
            return Group(*lines)

    def _new_bar(self, total: float | None) -> None:
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        self._bar.add_task(self._title, total=total, where="")

    def _move_bar(self, completed: float, where: str) -> None:
        self._bar.update(self._bar.task_ids[-1], completed=completed, where=where)

    def _busy_line(self) -> RenderableType:
        since = duration_phrase(self._clock() - self._busy_since)
        within = self._report is not None and self._progress is not None  # before the steps the bar shows it
        inside = f"{self._progress:.0%}, {since}" if within else since
        left = left_phrase(seconds_left(self._bar)) if self._report is not None else ""
        return _line(Text(f"{self._busy} ({inside}){left}", style="dim"))

    def _node_lines(self, room: int) -> list[RenderableType]:
        """Returns one line per node; the nodes that do not fit in `room` lines are counted in the last one."""
        nodes = list(self._nodes.items())
        shown = nodes if len(nodes) <= room else nodes[: room - 1]
        wide = min(max((len(name) for name, _ in nodes), default=0), max(self._console.width // 3, 8))
        speeds = self._report.node_speeds if self._report is not None else {}
        lines: list[RenderableType] = []
        for name, (state, message) in shown:
            fitting = name if len(name) <= wide else name[: wide - 1] + "…"
            rate = rate_phrase(speeds[name]) if name in speeds else ""
            rest = "  ".join(part for part in (rate, message) if part)
            lines.append(
                _line(Text.assemble(f"  {fitting:<{wide}}  ", (f"{state:<10}", _STYLES.get(state, "")), f"  {rest}"))
            )
        if len(shown) < len(nodes):
            lines.append(_line(Text(f"  and {len(nodes) - len(shown)} more")))
        return lines


@contextmanager
def live_display(
    stream: TextIO, *, title: str, environ: Mapping[str, str], clock: Callable[[], float]
) -> Iterator[LiveDisplay]:
    """Draws on a terminal four times a second while the block lasts; only the sentences stay."""
    console = Console(file=stream, force_terminal=True, highlight=False, _environ=environ)
    display = LiveDisplay(console, title=title, clock=clock)
    with Live(get_renderable=display.draw, console=console, refresh_per_second=4, transient=True):
        yield display


def _line(text: Text) -> Text:
    """Returns the text as one line, cut with an ellipsis where the terminal is too narrow."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
