"""Checkpoints: adapter folders named by step and validation loss, a link to the best, and pruning.

    checkpoints/step-00050-val1.2345/   evaluated
    checkpoints/step-00050/             not evaluated
    checkpoints/best -> step-00050-val1.2345

A checkpoint folder appears whole, by one rename, and disappears whole.
"""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlxdist.coordinator.storage.run_folder import RunFolder, saving, sync_folder

_NAME = re.compile(r"step-(\d+)(-val.+)?")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One saved adapter folder, and the step that made it."""

    step: int
    path: Path


def checkpoint_name(step: int, val_loss: float | None) -> str:
    """Returns the folder's name; `val_loss` is None where the step was not evaluated."""
    return f"step-{step:05d}" if val_loss is None else f"step-{step:05d}-val{val_loss:.4f}"


def list_checkpoints(run: RunFolder) -> tuple[Checkpoint, ...]:
    """Returns the checkpoints of a run, oldest step first."""
    if not run.checkpoints.is_dir():
        return ()
    found = []
    for path in run.checkpoints.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append(Checkpoint(int(match[1]), path))
    return tuple(sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.path.name)))


def save_checkpoint(run: RunFolder, step: int, val_loss: float | None, write: Callable[[Path], None]) -> Path:
    """Saves a checkpoint: `write` fills the folder it is given. Returns the checkpoint's folder.

    A checkpoint of the same step from an earlier session of the run is replaced, and `best` follows.

    Raises:
        SaveError: it could not be written; the earlier checkpoints are kept.
    """
    target = run.checkpoints / checkpoint_name(step, val_loss)
    with saving(target):
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            write(target)  # a folder cannot be renamed over another: each of its files is replaced on its own
        else:
            aside = run.checkpoints / f".{target.name}.aside"
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            try:
                write(aside)
                aside.rename(target)
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)
                raise
            sync_folder(run.checkpoints)
        best = best_checkpoint(run)
        for other in list_checkpoints(run):
            if other.step == step and other.path != target:
                if best == other.path:
                    link_best(run, target)
                _remove(other.path)
    return target


def link_best(run: RunFolder, checkpoint: Path) -> None:
    """Points `checkpoints/best` at a checkpoint: a relative link, replaced by one rename."""
    aside = run.checkpoints / ".best.aside"
    with saving(run.checkpoints / "best"):
        aside.unlink(missing_ok=True)
        aside.symlink_to(checkpoint.name)
        aside.replace(run.checkpoints / "best")
        sync_folder(run.checkpoints)


def best_checkpoint(run: RunFolder) -> Path | None:
    """Returns the folder that `best` points at, or None where there is no such checkpoint."""
    try:
        target = run.checkpoints / os.readlink(run.checkpoints / "best")
    except OSError:
        return None
    return target if target.is_dir() else None


def prune_checkpoints(run: RunFolder, keep: int | str) -> tuple[Path, ...]:
    """Removes all but the newest `keep` checkpoints ("all": keeps all) and the best. Returns those removed."""
    if keep == "all":
        return ()
    best = best_checkpoint(run)
    checkpoints = list_checkpoints(run)
    old = checkpoints[: max(len(checkpoints) - int(keep), 0)]
    gone = tuple(checkpoint.path for checkpoint in old if checkpoint.path != best)
    for path in gone:
        with saving(path):
            _remove(path)
    return gone


def _remove(path: Path) -> None:
    """Removes a checkpoint whole: one rename hides it, then its files go one by one."""
    aside = path.with_name(f".{path.name}.aside")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
