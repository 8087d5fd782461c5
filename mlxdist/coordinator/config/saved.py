"""The configuration of a run that was started before, read back from its config.json."""

from dataclasses import replace
from pathlib import Path

from mlxdist.coordinator.config.field_types import checked
from mlxdist.coordinator.config.keys import build, flat, hints
from mlxdist.coordinator.config.load import load_config
from mlxdist.coordinator.config.paths import BadPathError, absolute, resolve_path
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.storage.run_folder import RunFolder, read_json
from mlxdist.protocol.errors import UserError


def run_at(path: Path) -> RunFolder:
    """Returns the run in the folder `path`, or in the output folder of the run file `path`.

    Raises UserError where there is no run, ConfigError for a run file with faults.
    """
    folder = load_config(path).output if path.is_file() else absolute(str(path), Path.cwd())
    run = RunFolder(folder)
    if not run.config.is_file():
        what = "there is no such folder" if not folder.exists() else f"it has no {run.config.name}"
        raise UserError(f"{folder} is not a run: {what}. Name the output folder of a run, or its run.toml.")
    return run


def saved_config(run: RunFolder, *, model: str = "") -> RunConfig:
    """Returns the configuration that the run was trained with, nothing left "auto" in [memory].

    `model`: a folder or hub id in place of the base model's, where that has moved.

    Raises UserError for a damaged file and for a base model that is not there.
    """
    known = hints()
    try:
        given = {key: value for key, value in flat(read_json(run.config)) if key in known}
        values = {key: value if value is None else checked(known[key], value) for key, value in given.items()}
        config = replace(build(values), output=run.path)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{run.config} cannot be used: {error}. Restore the file.") from None
    try:
        return replace(config, model=resolve_path("model", model or config.model, Path.cwd()))
    except BadPathError as error:
        cure = "" if model else "; where it has moved, name it with --model"
        raise UserError(f"the base model {model or config.model!r} {error}{cure}") from None
