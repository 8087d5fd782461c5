"""The runs below a folder, by what their files say; a run that is training is only read."""

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from mlxdist.coordinator.report.history import History, read_history
from mlxdist.coordinator.report.summary import Ending
from mlxdist.coordinator.storage.open_run import read_manifest
from mlxdist.coordinator.storage.run_folder import RunFolder, read_json
from mlxdist.protocol.errors import UserError

RunState = Literal["training", "stopped", Ending]  # stopped: it ended without a word, as when it was killed
ENDINGS: tuple[Ending, ...] = ("done", "interrupted", "failed")
CLOCK_SECONDS = 2.0  # by which the start of a process and the time of a file may disagree


@dataclass(frozen=True)
class FoundRun:
    """One run: what it is, and how far it has come."""

    path: Path
    method: str
    model: str
    created_at: str  # ISO 8601
    state: RunState
    history: History

    @property
    def steps(self) -> int:
        """Steps done."""
        return max(self.history.train_losses, default=0)


def runs_below(folder: Path) -> list[FoundRun]:
    """Returns the runs in and below `folder`, the oldest first. Raises UserError where there is no such folder."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: name one that holds runs, or leave it out for this one")
    return sorted(_walk(folder), key=lambda run: (run.created_at, str(run.path)))


def run_in(path: Path) -> FoundRun | None:
    """Returns the run in the folder `path`, or None where there is none."""
    folder = RunFolder(path)
    manifest = read_manifest(folder)
    if manifest is None or "method" not in manifest:
        return None
    history = read_history(folder.metrics_jsonl)
    return FoundRun(
        path=path,
        method=str(manifest["method"]),
        model=str(manifest.get("base_model", "")),
        created_at=str(manifest["created_at"]),
        state=_ended(history) or ("training" if is_held(folder) is True else "stopped"),
        history=history,
    )


def saved_settings(run: FoundRun) -> dict[str, Any]:
    """Returns the content of the run's config.json; nothing where it was not written yet, or is damaged."""
    with suppress(OSError, ValueError):
        return read_json(RunFolder(run.path).config)
    return {}


def is_held(run: RunFolder) -> bool | None:
    """Returns true while a coordinator on this machine writes in the run, by the process and host in its lock.

    None: its coordinator is, or was, on another host, whose processes are not seen from here.

    The lock itself is not touched: to try it for a moment could keep out a coordinator that starts just then.
    """
    lock = lock_of(run)
    try:
        number, _, host = lock.read_text(encoding="utf-8").strip().partition(" ")
        if host not in ("", platform.node()):
            return None
        process = psutil.Process(int(number))
        return bool(process.create_time() <= lock.stat().st_mtime + CLOCK_SECONDS)
    except (OSError, ValueError, psutil.Error):
        return False


def lock_of(run: RunFolder) -> Path:
    """Returns the file that names what writes in the run; it is written when that begins to."""
    return run.state / "lock"


def _ended(history: History) -> RunState | None:
    """The end that the run has told; None where it has not, or was resumed since."""
    return next((ending for ending in ENDINGS if ending == history.status), None)


def _walk(folder: Path) -> Iterator[FoundRun]:
    """Yields the runs; nothing is searched below one, nor in hidden folders."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if "manifest.json" in files and (run := run_in(Path(place))) is not None:
            yield run
            folders.clear()
