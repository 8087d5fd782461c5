"""The facts that the first settings of a run follow from: rows, lengths and labels, the model, this machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxdist.coordinator.batch.row_store import StoredRows
from mlxdist.coordinator.config.keys import build
from mlxdist.coordinator.config.paths import BadPathError, resolve_path
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.data.ingest import Progress, read_source
from mlxdist.coordinator.data.load import encoding_of
from mlxdist.coordinator.data.sources import find
from mlxdist.coordinator.encode.row_errors import RowFault
from mlxdist.coordinator.inspect.inspect import NO_LIMIT, guess_method, plain_encoding
from mlxdist.coordinator.memory.fit import Machine
from mlxdist.protocol.budget import GB, usable_bytes
from mlxdist.protocol.errors import DataError, UserError
from mlxdist.protocol.methods import METHODS

CHARACTERS_PER_TOKEN = 3  # few, so that an estimate is rather too long

# Suggestions by the bytes that MLX may use: each leaves most of them for long rows.
MODELS = (
    (8 * GB, "mlx-community/Qwen3-1.7B-4bit"),
    (20 * GB, "mlx-community/Qwen3-4B-4bit"),
    (float("inf"), "mlx-community/Qwen3-8B-4bit"),
)


@dataclass(frozen=True)
class Survey:
    """Some data as they are, before anything is chosen."""

    data: str  # an absolute path, or a hub id
    model: str  # an absolute path, or a hub id
    model_given: bool  # otherwise it is a suggestion, and lengths are estimates
    method: str
    shape: str  # the keys of a row
    name: str  # of the training file
    rows: StoredRows
    lengths: Sequence[int]  # tokens of each row, before any cut
    faults: tuple[RowFault, ...]
    n_rows: int  # good and faulty
    has_valid: bool


def survey(data: str, model: str, machine: Machine, progress: Progress) -> Survey:
    """Reads the training rows of `data` as the method would whose form they have.

    Raises UserError for a path that leads nowhere, and DataError for rows of no known form.
    """
    path, base = _resolved("data.path", data), _resolved("model", model) if model else suggested(machine)
    splits = find(path)
    config = uncut(path, base, guess_method(splits.train))
    encoding = encoding_of(config) if model else plain_encoding(config)
    file = read_source(splits.train, encoding, progress)
    if not len(file.store):
        why = f": {file.faults[0].where}: {file.faults[0].reason}" if file.faults else ""
        raise DataError(f"{splits.train.name} has no row that can be trained on{why}")
    lengths = np.asarray(file.store.lengths)
    if not model:
        lengths = -(-lengths // CHARACTERS_PER_TOKEN)
    return Survey(
        data=path,
        model=base,
        model_given=bool(model),
        method=config.method,
        shape=file.shape,
        name=splits.train.name,
        rows=StoredRows(file.store),
        lengths=lengths.tolist(),
        faults=file.faults,
        n_rows=file.n_rows,
        has_valid=splits.valid is not None,
    )


def suggested(machine: Machine) -> str:
    """Returns a model that a machine of this size trains well."""
    usable = usable_bytes(machine.total, machine.system)
    return next(name for limit, name in MODELS if usable < limit)


def uncut(data: str, model: str, method: str) -> RunConfig:
    """Returns the method's defaults, under which no row is cut."""
    values: dict[str, Any] = {"model": model, "method": method, "output": Path("runs"), "data.path": data}
    return build({**METHODS[method].defaults, **values, "batch.max_length": NO_LIMIT})


def _resolved(key: str, text: str) -> str:
    try:
        return str(resolve_path(key, text, Path.cwd()))
    except BadPathError as error:
        raise UserError(f"{text} {error}") from None
