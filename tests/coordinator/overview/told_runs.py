"""Run folders as runs leave them, without a training."""

from datetime import UTC, datetime
from pathlib import Path

from mlxdist.coordinator.config.keys import build
from mlxdist.coordinator.config.schema import as_json
from mlxdist.coordinator.report.format import StepReport
from mlxdist.coordinator.report.reporter import Reporter
from mlxdist.coordinator.report.summary import Ending
from mlxdist.coordinator.storage.open_run import open_run
from mlxdist.coordinator.storage.run_folder import write_json


class NoDisplay:
    """Shows nothing."""

    def __getattr__(self, name: str) -> object:
        return lambda *args, **kwargs: None


def make_run(
    path: Path, *, minute: int = 0, steps: int = 4, ending: Ending | None = "done", rate: float = 1e-3
) -> Path:
    """A run of the year 2026 with one evaluation after every second step; the losses fall."""
    created = datetime(2026, 5, 1, 12, minute, tzinfo=UTC)
    with open_run(path, resume=False, base_model="org/tiny", method="sft", created_at=created) as run:
        config = build({"model": "org/tiny", "output": path, "data.path": "rows", "train.learning_rate": rate})
        write_json(run.config, as_json(config))
        clock = iter(range(10_000))
        report = Reporter(run, NoDisplay(), clock=lambda: float(next(clock)))  # type: ignore[arg-type]
        for step in range(1, steps + 1):
            report.step(StepReport(step, 8, {"loss": 3.0 / step}, 1.0, rate, 10, 20, 1.0))
            if step % 2 == 0:
                report.val(step, 4.0 / step, {}, 1.0)
                report.checkpoint(step, run.checkpoints / f"step-{step}", best=True)
        if ending:
            report.done("over", ending)
    return path
