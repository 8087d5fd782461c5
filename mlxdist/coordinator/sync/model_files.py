"""The files of a model that training needs, found on this machine, fetched from the hub when they are not."""

from pathlib import Path

from mlxdist.coordinator.config.paths import no_folder
from mlxdist.coordinator.launch.workdir import model_name
from mlxdist.coordinator.memory.model_files import find_model
from mlxdist.coordinator.sync.files import File
from mlxdist.protocol.errors import UserError
from mlxdist.protocol.model_files import SUFFIXES

PATTERNS = tuple(f"*{suffix}" for suffix in SUFFIXES)


def model_files(model: str) -> tuple[File, ...]:
    """Returns the files of a model, by folder or hub id, with their hashes.

    A model that is not on this machine yet is fetched from the hub. Raises UserError.
    """
    folder = find_model(model) or _fetched(model)
    found = [path for path in sorted(folder.iterdir()) if path.name.endswith(SUFFIXES)]
    return tuple(File.of(f"models/{model_name(model)}/{path.name}", path) for path in found if path.is_file())


def _fetched(model: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(PATTERNS)))
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"model = {model!r}: {no_folder(model)}, and the hub did not give it: {first}") from error
