"""A report, a saver and an evaluation that do nothing but remember the losses, for laws about the loop alone."""

from dataclasses import dataclass, field

from mlxdist.coordinator.report.format import StepReport
from mlxdist.coordinator.training.state import State


@dataclass
class Silent:
    """Stands in for Reporter, Saver and Validation."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)

    def step(self, report: StepReport) -> None:
        self.losses.append(report.loss)
        self.norms.append(report.grad_norm)
        self.reports.append(report)

    def due(self, step: int, last: bool) -> bool:
        return False

    def save_if_due(self, state: State, last: bool) -> None:
        pass

    def save(self, state: State) -> None:
        pass
