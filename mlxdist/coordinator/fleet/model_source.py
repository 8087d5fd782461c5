"""The files of the run's model on this machine's disk, read for nodes that have no copy."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from mlxdist.coordinator.cluster.model_transfer import Answer, BlockRead, Listed, ReadBlock, Reading, Unreadable
from mlxdist.coordinator.storage.file_hashes import FileHashes
from mlxdist.protocol.messages import ModelFile
from mlxdist.protocol.model_files import WORK_FOLDER, is_model_file
from mlxdist.protocol.vectors import BLOCK_BYTES


def remembered_hashes() -> Path:
    """Returns the file of this user in which the hashes of model files are kept."""
    return Path.home() / WORK_FOLDER / "hashes.json"


@dataclass
class ModelSource:
    """A model's folder, and its files once they are listed; `remembered`: the file that keeps their hashes."""

    folder: Path
    remembered: Path
    _listed: list[tuple[Path, int, int]] = field(default_factory=list)  # path, bytes, nanoseconds of its last change

    def answer(self, asked: Reading) -> Answer:
        """Lists the files, which reads each once where its hash is not known yet, or reads one block."""
        try:
            return self._block(asked) if isinstance(asked, ReadBlock) else self._list()
        except OSError as error:
            return Unreadable(f"{error.filename or self.folder}: {error.strerror}")

    def _list(self) -> Answer:
        hashes, files = FileHashes(self.remembered), list[ModelFile]()
        for path in sorted(self.folder.iterdir()):
            if is_model_file(path.name) and path.is_file():
                status = path.stat()
                files.append(ModelFile(path.name, status.st_size, hashes.sha256(path)))
                self._listed.append((path, status.st_size, status.st_mtime_ns))
        hashes.save()
        whole = any(file.name.endswith(".safetensors") for file in files)  # else the hub's cache has a part of it
        return Listed(tuple(files) if whole else ())

    def _block(self, asked: ReadBlock) -> Answer:
        path, size, changed = self._listed[asked.file]
        with path.open("rb") as stream:
            status = path.stat()
            stream.seek(asked.block * BLOCK_BYTES)
            payload = stream.read(BLOCK_BYTES)
        if (status.st_size, status.st_mtime_ns) != (size, changed):
            return Unreadable(f"{path} has changed since the run began")
        return BlockRead(asked, payload, hashlib.sha256(payload).hexdigest())
