"""Runs as their folders tell them: a DPO run that lost a node, with texts from rows and names that are markup."""

from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from mlxdist.coordinator.cluster.events import NodeNews
from mlxdist.coordinator.config.load import with_defaults
from mlxdist.coordinator.config.schema import as_json
from mlxdist.coordinator.report.format import StepReport
from mlxdist.coordinator.report.reporter import Reporter
from mlxdist.coordinator.report.summary import Ending
from mlxdist.coordinator.storage.checkpoints import link_best, save_checkpoint
from mlxdist.coordinator.storage.open_run import open_run
from mlxdist.coordinator.storage.run_folder import RunFolder, write_json
from mlxdist.protocol.tree import Span

EVIL = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>"
SECRET = "https://hooks.example.org/services/T0KEN"


class NoDisplay:
    """Shows nothing."""

    def __getattr__(self, name: str) -> object:
        return lambda *args, **kwargs: None


class Seconds:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def told_run(path: Path, *, steps: int = 6, ending: Ending | None = "done", evil: str = "", rate: float = 1e-3) -> Path:
    """A DPO run of two nodes and 10 s a step; b is lost in step 4, which takes 25 s. Every second step is evaluated."""
    with ExitStack() as stack:
        created = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
        run = stack.enter_context(
            open_run(path, resume=False, base_model=f"org/tiny{evil}", method="dpo", created_at=created)
        )
        keys = {"model": f"org/tiny{evil}", "output": path, "data.path": str(path.parent / "Jane Doe" / "my rows")}
        more = {"train.learning_rate": rate, "train.steps": 8, "train.notify": SECRET, "data.chat_template": evil}
        write_json(run.config, as_json(with_defaults({**keys, **more, "method": "dpo"}, Path("run.toml"))))
        clock = Seconds()
        report = Reporter(run, NoDisplay(), clock=clock)  # type: ignore[arg-type]
        report.stage(f"loading {path.parent}")
        for name in ("a", "b"):
            report.node(NodeNews(name, "ready", ""))
        for step in range(1, steps + 1):
            if step == 4:
                cause = f"not heard for 15 s from 192.168.7.31:51222 {evil}, see {path}/logs/b.log"
                report.node(NodeNews("b", "dead", cause, leaves=(Span(2, 5),)))
            seconds = 25.0 if step == 4 else 10.0
            clock.now += seconds
            metrics = {"loss": 0.7 / step, "rewards/margins": step / 10, "rewards/accuracies": 0.5}
            recomputed = 3 if step >= 4 else 0
            report.step(StepReport(step, 8, metrics, 1.0, rate, 100, 200, seconds, 1.5, recomputed))
            if step == 4:
                report.node(NodeNews("b", "ready", ""))
            if step % 2 == 0:
                loss = 0.75 / step
                report.val(step, loss, {"rewards/accuracies": 0.25 * step / 2, "rewards/margins": 0.1}, 1.0)
                folder = save_checkpoint(run, step, loss, _adapter)
                link_best(run, folder)
                report.checkpoint(step, folder, best=True)
        if ending:
            _adapter(path)
            report.done(f"over {evil}; the adapter is in {path}", ending)
    return path


def _adapter(folder: Path) -> None:
    RunFolder(folder).adapters.write_bytes(b"")
