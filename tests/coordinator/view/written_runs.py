"""Run folders as a coordinator leaves them, written by the real reporter with a clock of its own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from mlxdist.coordinator.cluster.events import NodeNews
from mlxdist.coordinator.cluster.timeline import NodeWork
from mlxdist.coordinator.config.keys import build
from mlxdist.coordinator.config.schema import as_json
from mlxdist.coordinator.report.format import StepReport
from mlxdist.coordinator.report.reporter import Reporter
from mlxdist.coordinator.storage.run_folder import RunFolder, write_json
from mlxdist.protocol.tree import Span

STEP_SECONDS = 2.0
NODES = ("mini-1", "mini-2", "mini-3")


class NoDisplay:
    """Shows nothing."""

    def __getattr__(self, name: str) -> object:
        return lambda *args, **kwargs: None


@dataclass
class WrittenRun:
    """A run whose every step takes two seconds, and one in which a node is lost six."""

    path: Path
    rate: float = 1e-3
    now: float = 0.0
    step: int = 0
    total: int = 40
    report: Reporter = field(init=False)

    def __post_init__(self) -> None:
        run = RunFolder(self.path)
        for folder in (run.checkpoints, run.state, run.logs):
            folder.mkdir(parents=True, exist_ok=True)
        created = datetime(2026, 5, 1, 12, tzinfo=UTC).isoformat()
        write_json(run.manifest, {"version": 1, "created_at": created, "base_model": "org/tiny", "method": "dpo"})
        config = build({"model": "org/tiny", "output": self.path, "data.path": "r", "train.learning_rate": self.rate})
        write_json(run.config, as_json(config))
        self.report = Reporter(run, NoDisplay(), clock=lambda: self.now)  # type: ignore[arg-type]
        for name in NODES:
            self.news(name, "connecting", "connected")
            self.news(name, "ready", "")

    def news(self, name: str, state: str, cause: str, action: str = "", leaves: tuple[Span, ...] = ()) -> None:
        """Tells news of a node."""
        self.report.node(NodeNews(name, state, cause, action=action, leaves=leaves))

    def take(self, steps: int = 1, *, loss: float | None = None, lost: str = "", metrics: bool = True) -> "WrittenRun":
        """Takes steps; in the last one the node `lost` loses its worker, and is back after three seconds."""
        for number in range(steps):
            self.step += 1
            losing = lost and number == steps - 1
            if losing:
                self.now += 1.0
                self.news(lost, "connecting", "the worker was killed", leaves=(Span(2, 4),))
                self.now += 3.0
                self.news(lost, "ready", "")
            self.now += STEP_SECONDS
            falling = 0.7 / (1 + self.step / 10) if loss is None else loss
            rewards = {f"rewards/{name}": sign / falling for name, sign in (("chosen", 1), ("rejected", -1))}
            more = {**rewards, "rewards/margins": 2 / falling, "rewards/accuracies": 0.9} if metrics else {}
            self.report.step(
                StepReport(
                    self.step,
                    self.total,
                    {"loss": falling, **more},
                    1.5,
                    self.rate,
                    80,
                    200,
                    STEP_SECONDS + (4.0 if losing else 0.0),
                    peak_gb=1.5,
                    leaves_recomputed=2 if losing else 0,
                    work=work_of(lost if losing else ""),
                )
            )
        return self

    def evaluate(self, *, best: bool = True) -> "WrittenRun":
        """Evaluates, and saves a checkpoint."""
        loss = 0.8 / (1 + self.step / 10)
        self.report.val(self.step, loss, {"rewards/margins": 1.0, "rewards/accuracies": 0.8}, 1.0)
        folder = RunFolder(self.path).checkpoints / f"step-{self.step:05d}-val{loss:.4f}"
        folder.mkdir()
        self.report.checkpoint(self.step, folder, best=best)
        return self


def work_of(lost: str) -> Mapping[str, NodeWork]:
    """The work of three nodes in a step of six leaves."""
    made = {}
    for place, name in enumerate(NODES):
        first = 2 * place
        rows = [("down", 0.0, 60.0, 0, 0), ("leaf", 60.0, 900.0, first, first + 1)]
        rows += [("lost", 900.0, 1000.0, first + 1, first + 2)] if name == lost else []
        again = 4000.0 if name == lost else 900.0
        rows += [("leaf", again, again + 800, first + 1, first + 2), ("up", again + 800, again + 950, first, first + 2)]
        made[name] = NodeWork(900.0 + place, 1.1 + place / 10, "ready", rows)
    return made
