"""The run folder: its files, and the one way in which they are written.

    adapters.safetensors, adapter_config.json   the final adapter
    manifest.json  config.json  metrics.jsonl  metrics.json
    checkpoints/   state/   logs/

Every write goes aside, is flushed to the disk, and takes the place of the old file by a rename: a reader, or
a run that comes back after a crash, finds the old file or the new one and never a half.
"""

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mlxdist.protocol.errors import SaveError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of one run. A value: making it touches no disk."""

    path: Path

    @property
    def adapters(self) -> Path:
        """The final adapter's tensors, in mlx-lm's layout."""
        return self.path / "adapters.safetensors"

    @property
    def adapter_config(self) -> Path:
        """The settings that mlx-lm needs to load the tensors."""
        return self.path / "adapter_config.json"

    @property
    def manifest(self) -> Path:
        """The base model, the method, and the time of the start."""
        return self.path / "manifest.json"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints, one loadable adapter folder each."""
        return self.path / "checkpoints"

    @property
    def state(self) -> Path:
        """The folder of the files that --resume needs."""
        return self.path / "state"

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.json"

    @property
    def metrics_jsonl(self) -> Path:
        """One event per line, as it happens."""
        return self.path / "metrics.jsonl"

    @property
    def metrics_json(self) -> Path:
        """The summary, written when the run ends."""
        return self.path / "metrics.json"

    @property
    def logs(self) -> Path:
        """The folder of logs, one file per node."""
        return self.path / "logs"


def write_aside(path: Path, write: Callable[[BinaryIO], None], *, previous: Path | None = None) -> None:
    """Replaces `path` by the bytes that `write` puts into its stream: aside, fsync, rename, fsync of the folder.

    `previous`: the name under which the old file is kept; it is there under both names until the rename.

    Raises:
        SaveError: the disk is full, the folder is read-only, …; the old file, if there was one, is untouched.
        Exception: whatever `write` itself raises, with the old file untouched.
    """
    aside = path.with_name(f".{path.name}.aside")
    with saving(path):
        try:
            with aside.open("wb") as stream:
                write(stream)
                stream.flush()
                os.fsync(stream.fileno())
            if previous is not None and path.is_file():
                keep_as(path, previous)
            aside.replace(path)
        except BaseException:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def write_json(path: Path, value: object) -> None:
    """Replaces `path` by `value` as indented JSON; NaN and infinities become null, since JSON has none."""
    text = json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_bytes(path, json_bytes(text))


def write_bytes(path: Path, data: bytes, *, previous: Path | None = None) -> None:
    """Replaces `path` by `data`. Raises SaveError, as `write_aside`."""
    write_aside(path, lambda stream: _put(stream, data), previous=previous)


def json_bytes(text: str) -> bytes:
    r"""Returns JSON as UTF-8; a byte of a path that is no UTF-8 becomes \udcXX, as Python reads it back."""
    return text.encode("utf-8", "backslashreplace")


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in `path`. Raises OSError, or ValueError with what is there instead."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError("it is empty" if not path.stat().st_size else f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"it holds {json.dumps(value)[:40]} in place of a JSON object")
    return value


def keep_as(path: Path, other: Path) -> None:
    """Replaces `other` by the file `path`, which stays: a second name, or a copy where the disk has no hard links.

    Raises SaveError, with `other` as it was.
    """
    aside = other.with_name(f".{other.name}.aside")
    with saving(other):
        if other.exists() and path.samefile(other):
            return  # a rename from one name of a file to another does nothing, and would leave `aside` behind
        try:
            aside.unlink(missing_ok=True)
            try:
                os.link(path, aside)
            except OSError:
                shutil.copyfile(path, aside)
                sync_file(aside)
            aside.replace(other)
        except BaseException:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            raise
        sync_folder(other.parent)


def append(path: Path, data: bytes) -> None:
    """Appends `data` to the end of `path`, whole or not at all. Raises SaveError, with the file as it was."""
    with saving(path), path.open("ab", buffering=0) as stream:
        size = stream.seek(0, os.SEEK_END)
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[stream.write(rest) :]
        except BaseException:
            stream.truncate(size)
            raise


def sync_file(path: Path) -> None:
    """Flushes a file, if there is one, to the disk. Raises SaveError."""
    with saving(path), suppress(FileNotFoundError), path.open("rb") as stream:
        os.fsync(stream.fileno())


def finite(value: object) -> object:
    """Returns `value` with every NaN and infinity replaced by None, in lists and mappings too."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def sync_folder(folder: Path) -> None:
    """Flushes a folder's own entries, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def saving(path: Path) -> Iterator[None]:
    """Turns the system's errors on `path` into a SaveError that says what is kept and what to do."""
    try:
        yield
    except OSError as error:
        kept = "The one from before is kept." if path.is_file() else "Nothing was written."
        if error.errno in _FULL:
            cause, cure = "the disk is full", "free some space"
        elif error.errno in _FORBIDDEN:
            cause, cure = "this user may not write there", "fix the permissions or name another `output`"
        else:
            cause, cure = error.strerror or str(error), "check the disk"
        remedy = cure[0].upper() + cure[1:] + ", then go on with --resume."
        raise SaveError(f"Could not write {path}: {cause}. {kept}", remedy, cure) from error


def _put(stream: BinaryIO, data: bytes) -> None:
    stream.write(data)
