"""Two runs side by side: the settings that differ, and the last values of their curves."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxdist.coordinator.config.keys import flat, hints
from mlxdist.coordinator.overview.find import FoundRun, run_in, saved_settings
from mlxdist.protocol.errors import UserError

NEVER_EQUAL = "output"


@dataclass(frozen=True)
class Comparison:
    """Two runs; of each difference the values in both, None where a run has none."""

    runs: tuple[FoundRun, FoundRun]
    settings: Mapping[str, tuple[Any, Any]]  # by dotted key, those that differ
    values: Mapping[str, tuple[Any, Any]]  # steps, wall time, and the last value of each curve


def compare(one: Path, other: Path) -> Comparison:
    """Returns the comparison of the runs in two folders. Raises UserError where one of them holds no run."""
    first, second = _run(one), _run(other)
    ours, theirs = (_settings(run) for run in (first, second))
    keys = [key for key in hints() if key in ours.keys() | theirs.keys() and key != NEVER_EQUAL]
    settings = {key: (ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key)}
    left, right = last_values(first), last_values(second)
    values = {name: (left.get(name), right.get(name)) for name in {**left, **right}}
    return Comparison((first, second), settings, values)


def last_values(run: FoundRun) -> dict[str, float | None]:
    """Returns the steps, the seconds and the last values of the curves of a run, by name."""
    history = run.history
    values: dict[str, float | None] = {"steps": run.steps, "wall_seconds": history.wall_seconds}
    if history.train_losses:
        values["train loss"] = history.train_losses[run.steps]
    if history.vals:
        last = max(history.vals)
        values["validation step"] = last
        values |= {f"validation {name}": value for name, value in history.vals[last].items()}
    if history.best is not None:
        values |= {"best step": history.best.step, "best validation loss": history.best.loss}
    if history.peak_gb is not None:
        values["peak_gb"] = history.peak_gb
    return values


def as_json(comparison: Comparison) -> str:
    """Returns the comparison as one JSON object."""
    content = {
        "runs": [str(run.path) for run in comparison.runs],
        "settings": comparison.settings,
        "values": comparison.values,
    }
    return json.dumps(content, ensure_ascii=False, indent=2)


def _run(path: Path) -> FoundRun:
    run = run_in(path)
    if run is None:
        raise UserError(f"{path} holds no run; mlxdist runs FOLDER lists those below a folder")
    return run


def _settings(run: FoundRun) -> dict[str, Any]:
    return {key: value for key, value in flat(saved_settings(run)) if key in hints()}
