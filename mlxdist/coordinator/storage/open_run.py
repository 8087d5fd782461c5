"""The opening of a run folder: a taken one is refused, a second coordinator kept out, half-written files removed."""

import errno
import fcntl
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from mlxdist.coordinator.storage.run_folder import RunFolder, read_json, saving, write_json
from mlxdist.protocol.errors import UserError


@contextmanager
def open_run(path: Path, *, resume: bool, base_model: str, method: str, created_at: datetime) -> Iterator[RunFolder]:
    """Makes the run folder, or opens the one to be resumed, and locks it until the block ends; writes `manifest.json`.

    A folder whose run never finished a step is used again without asking: nothing in it can be lost. The lock is the
    system's, so it ends with the process, also after a crash.

    Raises:
        UserError: the folder holds a run already, is not a run's, holds none to resume, or is in use.
        SaveError: it cannot be written.
    """
    run = RunFolder(path)
    if path.exists() and not path.is_dir():
        raise UserError(f"The output {path} is a file, not a folder. Name another `output`.")
    manifest = _manifest_to_resume(run) if resume else read_manifest(run)
    if not resume:
        _refuse_occupied(run, ours=manifest is not None)
    with saving(path):
        for folder in (run.checkpoints, run.state, run.logs):
            folder.mkdir(parents=True, exist_ok=True)
    with _held(run):
        with saving(path):
            _clear(run, resume)
        write_json(
            run.manifest,
            {
                "version": 1,
                "base_model": base_model,
                "adapter_path": str(path.resolve()),
                "method": method,
                "created_at": manifest["created_at"]
                if resume and manifest
                else created_at.isoformat(timespec="seconds"),
            },
        )
        yield run


def is_running(path: Path) -> bool:
    """Returns True while an mlxdist writes in the run folder `path`."""
    try:
        lock = os.open(RunFolder(path).state / "lock", os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(lock)


def read_manifest(run: RunFolder) -> dict[str, object] | None:
    """Returns the run's manifest, or None for a folder that is not a run of mlxdist."""
    try:
        return _whole_manifest(run)
    except (OSError, ValueError):
        return None


def _whole_manifest(run: RunFolder) -> dict[str, object]:
    """Raises OSError or ValueError, with the reason as a clause."""
    manifest = read_json(run.manifest)
    if missing := [key for key in ("version", "created_at") if key not in manifest]:
        raise ValueError(f"it lacks {' and '.join(missing)}")
    return manifest


def _manifest_to_resume(run: RunFolder) -> dict[str, object] | None:
    """Returns the manifest; None where it is gone and the state of a run is there.

    Raises UserError where there is no run, and for a damaged manifest.
    """
    try:
        return _whole_manifest(run)
    except FileNotFoundError:
        if any(run.state.glob("*.safetensors")):
            return None
        raise UserError(f"There is no run to resume in {run.path}. Leave --resume out to start one there.") from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{run.manifest} cannot be used: {error}. Restore the file, or delete it and add --resume again: it says "
            "when the run was started, and no bits depend on it."
        ) from None


def _refuse_occupied(run: RunFolder, *, ours: bool) -> None:
    elsewhere = 'name another one (`output = "…"` in the run file, or --set output=…), or move it away'
    if not ours:
        for taken in (run.adapters, run.adapter_config, run.config, run.manifest):
            if taken.exists():
                raise UserError(
                    f"The output folder {run.path} holds a {taken.name} that is not from a run of mlxdist, and the run "
                    f"would overwrite it. Please {elsewhere}."
                )
    elif run.adapters.exists() or any(run.checkpoints.glob("step-*")) or _has_trained(run.metrics_jsonl):
        raise UserError(
            f"The output folder {run.path} already holds a run. To go on with it, add --resume; to start a new one, "
            f"{elsewhere}."
        )


def _has_trained(metrics: Path) -> bool:
    """Returns true where the event file tells of at least one finished step."""
    try:
        with metrics.open(encoding="utf-8", errors="replace") as lines:
            return any('"event": "train"' in line for line in lines)
    except OSError:
        return False


def _clear(run: RunFolder, resume: bool) -> None:
    """Removes half-written files and half-removed folders; a fresh start also the events of a run without a step."""
    for folder in (run.path, run.state, run.checkpoints):
        for leftover in folder.glob(".*.aside"):
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
    if not resume:
        run.metrics_jsonl.unlink(missing_ok=True)
        run.metrics_json.unlink(missing_ok=True)
    elif run.metrics_jsonl.exists():
        with run.metrics_jsonl.open("rb+") as events:  # end a line that a crash tore, so that the next one is whole
            if events.seek(0, os.SEEK_END):
                events.seek(-1, os.SEEK_END)
                if events.read(1) != b"\n":
                    events.write(b"\n")


@contextmanager
def _held(run: RunFolder) -> Iterator[None]:
    """Keeps the folder for this process by a lock on `state/lock`, which holds our process id and host."""
    path = run.state / "lock"
    with saving(run.path):
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR):
                raise
            kind = "a link" if error.errno == errno.ELOOP else "a folder"
            raise UserError(f"{path} is {kind}, and would be written to. Delete it, then start again.") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            owner = " on ".join(os.read(lock, 300).decode(errors="replace").split(maxsplit=1)) or "unknown"
            raise UserError(
                f"Another mlxdist (process {owner.strip()}) is writing in {run.path}. Wait for it, or stop it first."
            ) from None
        with saving(run.path):
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()} {platform.node()}\n".encode(), 0)
        yield
    finally:
        os.close(lock)
