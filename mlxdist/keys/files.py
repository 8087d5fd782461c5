"""Files that hold a secret: written for their owner alone, and not read when another user may read them too."""

import os
import shlex
import stat
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from mlxdist.protocol.errors import SaveError, UserError

T = TypeVar("T")

MOST_BYTES = 4096


def read_private(path: Path, kind: type[T]) -> T:
    """Returns the JSON in a file of which only the owner knows the content.

    Raises UserError for a file that is missing, damaged, another user's, or open to others, with the command to type.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"the key file {path} cannot be read: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise UserError(f"the key file {path} belongs to another user: make a key of your own, with `mlxdist key`")
        if status.st_mode & 0o077 and stat.S_ISREG(status.st_mode):
            raise UserError(
                f"other users may open the key file {path} (mode {stat.S_IMODE(status.st_mode):04o}), so it is not "
                f"used. Type: chmod 600 {shlex.quote(str(path))}"
            )
        try:
            return msgspec.json.decode(stream.read(MOST_BYTES), type=kind)
        except (msgspec.DecodeError, OSError):
            raise UserError(
                f"the key file {path} does not hold the keys that belong in it: restore it, or delete it and make them "
                "again"
            ) from None


def write_private(path: Path, value: object) -> None:
    """Replaces `path` by `value` as JSON, whole or not at all, with mode 0600; its folder is made with mode 0700.

    Raises SaveError.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.aside")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(FileNotFoundError):
            aside.unlink()
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
            stream.flush()
            os.fsync(descriptor)
        aside.replace(path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink()
        raise SaveError(f"Could not write the key file {path}: {error.strerror}.", "Nothing was changed.") from None
