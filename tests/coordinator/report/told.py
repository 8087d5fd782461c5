"""Events as a run tells them, and a clock that passes only when told to."""

from collections.abc import Mapping
from typing import Any

from mlxdist.coordinator.report.picture import Event


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.seconds = 500.0

    def __call__(self) -> float:
        return self.seconds


def train(number: int, total: int | None = 100, at: float = 0.0, loss: float | None = 2.0, **more: Any) -> Event:
    """A step of 2 s with 80 supervised tokens; `at`: in seconds of the run."""
    progress = number / total if total else None
    where = f"step {number}" + (f" of {total}" if total else "")
    return {
        "event": "train",
        "wall_seconds": at,
        "step": number,
        "total_steps": total,
        "progress": progress,
        "message": f"{where}: loss {loss}, 40 tokens/s, 2.0 s a step",
        "loss": loss,
        "tokens_per_second": 40.0,
        "seconds": 2.0,
        **more,
    }


def val(step: int, loss: float | None, at: float = 0.0) -> Event:
    """An evaluation."""
    message = f"validation after step {step}: loss {loss}"
    return {"event": "val", "wall_seconds": at, "step": step, "loss": loss, "metrics": {}, "message": message}


def saved(step: int, *, best: bool = True) -> Event:
    """A checkpoint."""
    path = f"checkpoints/step-{step:05d}"
    return {"event": "checkpoint", "step": step, "best": best, "path": path, "message": f"saved {path}"}


def stage(message: str, **more: Any) -> Event:
    """The present work of the run; with `note` or `paused` a sentence."""
    return {"event": "stage", "message": message, **more}


def node(name: str, state: str, message: str = "", *, stays: bool = False) -> Event:
    """A node's news."""
    return {"event": "node", "name": name, "state": state, "message": message, "stays": stays}


def work(nodes: Mapping[str, Mapping[str, Any]]) -> Event:
    """The nodes' work in a step."""
    return {"event": "work", "nodes": nodes}


def worked(leaves: int, rate: float = 410.0, **more: Any) -> dict[str, Any]:
    """A node that has computed so many leaves."""
    rows = [["leaf", 0.0, 9.0, 0, leaves], ["up", 9.0, 10.0, 0, leaves]]
    return {"tokens_per_second": rate, "peak_gb": 5.2, "state": "ready", "rows": rows, **more}
