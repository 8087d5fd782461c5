"""The SHA-256 of large files, computed once: it holds while size, time and place on the disk are the same."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from mlxdist.coordinator.storage.run_folder import write_bytes
from mlxdist.protocol.errors import SaveError

MOST_BYTES = 8 << 20  # of the file that remembers


class Seen(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A file as it was when its hash was computed: bytes, nanoseconds, and the number that its disk gave it."""

    size: int
    changed: int
    number: int
    sha256: str


@dataclass
class FileHashes:
    """The hashes of files, remembered in one JSON file. One that is missing or damaged costs time alone."""

    path: Path
    known: dict[str, Seen] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            if self.path.stat().st_size <= MOST_BYTES:
                self.known = msgspec.json.decode(self.path.read_bytes(), type=dict[str, Seen])
        except (OSError, msgspec.DecodeError):
            self.known = {}

    def sha256(self, path: Path) -> str:
        """Returns the SHA-256 of a file in hex. Raises OSError."""
        path = path.resolve()
        status, known = path.stat(), self.known.get(str(path))
        as_now = (status.st_size, status.st_mtime_ns, status.st_ino)
        if known is not None and (known.size, known.changed, known.number) == as_now:
            return known.sha256
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        self.known[str(path)] = Seen(*as_now, digest)
        return digest

    def save(self) -> None:
        """Remembers what is known. Where that cannot be written, the next run computes it again."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(self.path, msgspec.json.encode(self.known))
        except (OSError, SaveError):
            return
