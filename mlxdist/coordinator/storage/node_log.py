"""A node's log: the lines that its worker printed, appended, and never more than a stated size."""

from pathlib import Path

from mlxdist.coordinator.storage.run_folder import append, saving

MOST_BYTES = 8 * 2**20


def append_line(path: Path, line: str, most_bytes: int = MOST_BYTES) -> None:
    """Appends a line; a log that would grow beyond `most_bytes` loses its older half, and its first line says so.

    Raises SaveError when it cannot be written.
    """
    data = (line + "\n").encode("utf-8", "replace")
    with saving(path):
        if path.exists() and path.stat().st_size + len(data) > most_bytes:
            _drop_older_half(path, most_bytes)
    append(path, data)


def _drop_older_half(path: Path, most_bytes: int) -> None:
    """Rewrites the file in place: a supervisor of this node may have it open, and goes on at its end."""
    note = f"[earlier lines were dropped: this log keeps {most_bytes / 2**20:.3g} MiB]\n".encode()
    with path.open("rb+") as log:
        size = log.seek(0, 2)
        log.seek(max(size - most_bytes // 2, 0))
        newest = log.read().partition(b"\n")[2]
        log.seek(0)
        log.write(note + newest)
        log.truncate()
