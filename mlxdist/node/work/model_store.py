"""A model that came over the wire, on this host's disk: a folder named by the hash of its files.

    ~/mlxdist/models/0123…ef/        one model; complete when every file has its size
        model.safetensors.part       what has come of a file so far; the next session goes on behind it
        tokenizer.json -> …          a file that was on this disk already, in the hub's cache or in another model

A name that a file gets here has passed `checked_files`, and the folder's name is computed on this host.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from mlxdist.protocol.errors import ConfigError, NodeError
from mlxdist.protocol.messages import ModelFile
from mlxdist.protocol.model_files import WORK_FOLDER, size_phrase
from mlxdist.protocol.untrusted import model_name
from mlxdist.protocol.vectors import BLOCK_BYTES

LOCK_SECONDS = 10.0  # for a worker that ends to let go of the folder
MARGIN_BYTES = 2 << 30  # that stay free on the disk


def own_models() -> Path:
    """Returns the folder of this user for models that come over the wire."""
    return Path.home() / WORK_FOLDER / "models"


def is_here(model: str) -> bool:
    """Returns True if this host has the model that a run names: a folder, or a whole copy in the hub's cache.

    Raises ConfigError for a name that is no hub id and no absolute path.
    """
    if os.path.isabs(model_name(model)):
        return os.path.isfile(f"{model}/config.json")  # which takes any text for a name
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return False
    return isinstance(found, str) and any(Path(found).parent.glob("model*.safetensors"))


class ModelStore:
    """The folder of one model. One worker of this host writes there at a time."""

    def __init__(self, folder: Path, *, margin: int = MARGIN_BYTES) -> None:
        """Makes the folder. Raises ConfigError where that is not possible, NodeError where another worker uses it."""
        self.folder, self._margin = folder, margin
        with _disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / ".lock").open("wb")
        until = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    self._lock.close()
                    raise NodeError(
                        f"another node on this Mac writes the same model into {folder}: join again when it is there"
                    ) from None
                time.sleep(0.1)

    def close(self) -> None:
        """Lets another worker write there."""
        self._lock.close()

    def has(self, file: ModelFile) -> bool:
        """Returns True if the whole file is there. Its hash was compared when it came."""
        path = self.folder / file.name
        return path.is_file() and path.stat().st_size == file.size

    def copy_elsewhere(self, file: ModelFile) -> Path | None:
        """Returns a file with the same bytes in the hub's cache or in another model; None: this disk has none."""
        seen = set[Path]()
        for path in _candidates(self.folder, file.name):
            with suppress(OSError):
                path = path.resolve()
                if path not in seen and path.stat().st_size == file.size and sha256(path) == file.sha256:
                    return path
            seen.add(path)
        return None

    def link(self, file: ModelFile, copy: Path) -> None:
        """Uses a copy that is on this disk already."""
        path = self.folder / file.name
        with _disk(self.folder):
            path.unlink(missing_ok=True)
            path.symlink_to(copy)

    def part(self, file: ModelFile) -> int:
        """Returns the bytes of a file that have come in earlier sessions, in whole blocks or all."""
        try:
            size = self._part(file).stat().st_size
        except FileNotFoundError:
            return 0
        return size if size == file.size else min(size, file.size) // BLOCK_BYTES * BLOCK_BYTES

    def check_space(self, needed: int) -> None:
        """Raises ConfigError where the disk would not hold so many bytes more, and some room for others."""
        free = shutil.disk_usage(self.folder).free
        if needed + self._margin > free:
            raise ConfigError(
                f"the model needs {size_phrase(needed)} on this Mac, and the disk of {self.folder.parent} has "
                f"{size_phrase(free)} free, of which {size_phrase(self._margin)} are left to others: free some space, "
                "or name a folder on another disk, with: mlxdist join --models FOLDER"
            )

    def open(self, file: ModelFile) -> "Part":
        """Opens what has come of a file, to go on behind it."""
        with _disk(self.folder):
            return Part(self._part(file), self.folder / file.name, file, self.part(file))

    def _part(self, file: ModelFile) -> Path:
        return self.folder / f"{file.name}.part"


class Part:
    """A file that comes block by block, with the hash of what is there."""

    def __init__(self, path: Path, whole: Path, file: ModelFile, size: int) -> None:
        self._path, self._whole, self._file, self.size = path, whole, file, size
        self._hash = hashlib.sha256()
        self._stream: BinaryIO = path.open("r+b" if path.exists() else "w+b")
        self._stream.truncate(size)
        while block := self._stream.read(BLOCK_BYTES):
            self._hash.update(block)

    def write(self, payload: memoryview) -> None:
        """Writes the next block. Raises ConfigError where the disk does not take it."""
        with _disk(self._path.parent):
            self._stream.write(payload)
            self._stream.flush()
        self._hash.update(payload)
        self.size += payload.nbytes

    def end(self) -> bool:
        """Gives the whole file its name. False: it has another hash than it should, and was deleted."""
        right = self._hash.hexdigest() == self._file.sha256
        with _disk(self._path.parent):
            if right:
                os.fsync(self._stream.fileno())
            self.close()
            if right:
                self._path.replace(self._whole)
            else:
                self._path.unlink()
        return right

    def close(self) -> None:
        """Closes the file; what has come is kept."""
        self._stream.close()


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file in hex. Raises OSError."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _candidates(here: Path, name: str) -> Iterator[Path]:
    """Yields the files of a name in the hub's cache, and in the models beside the folder `here`."""
    from huggingface_hub.constants import HF_HUB_CACHE

    yield from Path(HF_HUB_CACHE).glob(f"models--*/snapshots/*/{name}")
    yield from (path for path in here.parent.glob(f"*/{name}") if path.parent != here)


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """Turns an error of the disk into a ConfigError that says what to do."""
    try:
        yield
    except OSError as error:
        cure = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the folder"
        raise ConfigError(
            f"the model cannot be written into {folder}: {error.strerror}; {cure}, or name another folder, with: "
            "mlxdist join --models FOLDER. What has come is kept"
        ) from error
