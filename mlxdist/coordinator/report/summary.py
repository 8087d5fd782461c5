"""The summary of a run, as metrics.json holds it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from mlxdist.coordinator.report.goodput import LostTime
from mlxdist.coordinator.report.history import BestVal

Ending = Literal["done", "interrupted", "failed"]  # all steps done, stopped by the user after a save, or an error


@dataclass(frozen=True, slots=True)
class Results:
    """The part of a summary that no event tells: the configuration, and what is on the disk."""

    config: Mapping[str, object]  # resolved
    applied_ranks: Mapping[str, int]  # LoRA ranks by module path
    checkpoints: Sequence[Path]  # their folders, oldest first


@dataclass(frozen=True, slots=True)
class Told:
    """The part of a summary that was told by events, over all sessions of the run. A value is None if not finite."""

    train_losses: Mapping[int, float | None]  # by step
    vals: Mapping[int, Mapping[str, float | None]]  # by step: loss and metrics
    best: BestVal | None
    peak_gb: float | None
    wall_seconds: float
    lost: LostTime


def summary_of(ending: Ending, told: Told, results: Results, run: Path) -> dict[str, object]:
    """Returns the content of metrics.json; the checkpoints' paths become relative to the folder `run`."""
    steps = sorted(told.train_losses)
    trajectory = [{"step": step, **told.vals[step]} for step in sorted(told.vals)]
    return {
        "status": ending,
        "steps": steps[-1] if steps else 0,
        "wall_seconds": round(told.wall_seconds, 3),
        "peak_gb": told.peak_gb,
        "losses": {key: round(value, 3) if value is not None else None for key, value in asdict(told.lost).items()},
        "final_train_loss": told.train_losses[steps[-1]] if steps else None,
        "final_val_loss": trajectory[-1]["loss"] if trajectory else None,
        "best_val": told.best and asdict(told.best),
        "val_trajectory": trajectory,
        "train_losses": [told.train_losses[step] for step in steps],
        "applied_ranks": results.applied_ranks,
        "checkpoints": [path.relative_to(run).as_posix() for path in results.checkpoints],
        "config": results.config,
    }
