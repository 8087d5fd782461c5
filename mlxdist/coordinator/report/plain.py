"""Plain lines for files and pipes: never silent for long, never chatty over night."""

import threading
from collections.abc import Callable, Mapping
from typing import TextIO

from mlxdist.coordinator.report.eta import new_progress, seconds_left
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


class PlainDisplay:
    """Lines with the time since the start in front.

    A step is told every `report_every` steps and when nothing was said for `quiet_seconds`; so is, by `tick`, the work
    that is still going on. After `patient_after` seconds a line every `patient_seconds` is enough: a night's log stays
    short.
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
        self._steps = new_progress(clock)
        self._began = self._last_line = self._busy_since = clock()
        self._busy = self._next = "starting"  # what it does, and what after an evaluation
        self._ended = False
        self._progress: float | None = None  # of the stage
        self._speeds: Mapping[str, float] = {}
        self._known: set[str] = set()  # the nodes that were ready once
        self._lock = threading.RLock()

    def stage(self, message: str, progress: float | None) -> None:
        """Tells a new stage at once; its progress comes with the lines of `tick`."""
        with self._lock:
            if message != self._busy:
                self._set_busy(message)
                self.say(message)
            self._progress = progress

    def step(self, report: StepReport) -> None:
        """Tells a step if its turn has come, or if it was quiet for long."""
        with self._lock:
            if not self._steps.tasks:
                self._steps.add_task("", total=report.total_steps)
            self._steps.update(self._steps.task_ids[-1], completed=report.step)
            self._speeds = report.node_speeds
            self._next = "finishing" if report.step == report.total_steps else "working on the next step"
            self._set_busy(self._next)
            due = report.step % self._report_every == 0 or report.step in (1, report.total_steps)
            if due or self._quiet():
                left = left_phrase(seconds_left(self._steps))
                self.say(f"{step_phrase(report)}: {numbers_phrase(report)}{left}")

    def val(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """Tells an evaluation."""
        with self._lock:
            self._set_busy(self._next)
            self.say(val_phrase(step, loss, metrics))

    def node(self, name: str, state: str, message: str, *, stays: bool = False) -> None:
        """Tells a node's loss and return, and how it comes up at the start; not the coming and going of work."""
        coming = state not in ("busy", "ready") and (name not in self._known)
        if stays or coming:
            self.say(node_phrase(name, state, message))
        if state == "ready":
            self._known.add(name)

    def pause(self, sentence: str, *, over: bool) -> None:
        """Tells the pause and its end; `tick` goes on in between."""
        with self._lock:
            self._set_busy("working on the next step" if over else "waiting for nodes")
            self.say(sentence)

    def say(self, sentence: str) -> None:
        """Writes one line."""
        with self._lock:
            self._last_line = self._clock()
            self._stream.write(f"{clock_phrase(self._last_line - self._began)}  {sentence}\n")
            self._stream.flush()

    def end(self, sentence: str) -> None:
        """Writes the closing line; `tick` writes nothing after it."""
        with self._lock:
            self.say(sentence)
            self._ended = True

    def tick(self) -> None:
        """Writes what the run is busy with when nothing was said for long; to be called often."""
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
