"""A run folder whose events are told by hand, with real processes of loggers behind them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxdist.coordinator.config.keys import build
from mlxdist.coordinator.config.schema import as_json
from mlxdist.coordinator.loggers.loggers import Loggers
from mlxdist.coordinator.storage.run_folder import RunFolder, write_json

ROOT = Path(__file__).resolve().parents[3]


class ToldRun:
    """A run that tells its events as the reporter does: into the file first, then to the loggers."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        self.folder.state.mkdir(parents=True, exist_ok=True)
        config = build(
            {"model": "org/tiny", "output": path, "data.path": "rows", "train.notify": "https://secret.host/x"}
        )
        write_json(self.folder.config, as_json(config))
        self.said: list[str] = []

    def loggers(self, *names: str, library: Path | None = None, seconds: float = 60.0, **environ: str) -> Loggers:
        """The loggers of one session. `library`: a folder of modules in front of all others."""
        paths = [str(library)] if library is not None else []
        path = os.pathsep.join([*paths, str(ROOT), os.environ.get("PYTHONPATH", "")])
        return Loggers(names, self.folder, {**os.environ, **environ, "PYTHONPATH": path}, end_seconds=seconds)

    def tell(self, loggers: Loggers, event: str, **keys: Any) -> None:
        """Tells one event."""
        content = {"event": event, "time": "2026-05-01T12:00:00+00:00", "wall_seconds": 1.0, **keys}
        with self.folder.metrics_jsonl.open("a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")
        self.said += loggers.take(content)

    def steps(self, loggers: Loggers, first: int, last: int) -> None:
        """Tells these steps, and an evaluation after the last one."""
        for step in range(first, last + 1):
            metrics = {
                "loss": 1 / step,
                "rewards/chosen": 0.5,
                "grad_norm": 2.0,
                "learning_rate": 1e-3,
                "peak_gb": None,
            }
            self.tell(loggers, "train", step=step, total_steps=8, message="…", disturbed=False, seconds=0.5, **metrics)
        self.tell(loggers, "val", step=last, loss=0.25, metrics={"rewards/margins": 0.125}, seconds=1.5)

    def end(self, loggers: Loggers, status: str = "done") -> list[str]:
        """Tells the end, and returns all that was said since the last time."""
        self.tell(loggers, "done", status=status, step=0, message="over")
        said, self.said = [*self.said, *loggers.end()], []
        return said

    def heard(self) -> list[list[Any]]:
        """The calls that the misbehaving library has written down."""
        file = self.folder.path / "heard.jsonl"
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def wait_for(condition: Callable[[], bool]) -> None:
    """Waits until something is true; the test's own timeout ends it otherwise."""
    import time

    while not condition():
        time.sleep(0.01)
