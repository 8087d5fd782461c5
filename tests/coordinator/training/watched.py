"""Engines and reports that remember what was asked of them and told to them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mlxdist.coordinator.report.format import StepReport
from mlxdist.coordinator.training.state import State
from mlxdist.node.link.jobs import ComputeAssignment, Job, JobResults
from mlxdist.node.work.engine import Engine
from mlxdist.protocol import messages as m
from mlxdist.protocol.methods import METHODS
from tests.coordinator.training.silent import Silent


class Watched(Engine):
    """An engine that remembers what it was asked to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[ComputeAssignment] = []

    def perform(self, job: Job, session: m.SessionId, progress: Callable[[str], None]) -> JobResults:
        if isinstance(job, ComputeAssignment):
            self.asked.append(job)
        return super().perform(job, session, progress)


def leaves_without_reference(engines: Sequence[Watched], verb: str = "gradient") -> dict[int, int]:
    """Step -> the leaves for which the workers were asked to compute the reference."""
    found: dict[int, int] = {}
    for engine in engines:
        for job in engine.asked:
            if job.assignment.verb != verb:
                continue
            names = {name for spec in METHODS.values() for name in spec.reference}
            asked = [any(np.isnan(leaf.get(name, ())).any() for name in names) for leaf in job.row_inputs]
            if verb == "score":
                asked = ["reference" in job.assignment.parameters] * len(job.leaves)
            found[job.assignment.step] = found.get(job.assignment.step, 0) + sum(asked)
    return found


@dataclass
class Recorder(Silent):
    """Keeps every step's state, and calls `before` in front of the step that comes next."""

    states: list[State] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    before: Callable[[int], None] = lambda step: None

    def step(self, report: StepReport) -> None:
        super().step(report)
        if report.advice:
            self.notes.append(report.advice)

    def save_if_due(self, state: State, last: bool) -> None:
        self.states.append(state)
        self.before(state.step + 1)
