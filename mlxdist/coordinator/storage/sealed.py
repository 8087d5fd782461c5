"""A safetensors file with the SHA-256 of its content in its metadata: rot and cuts are found when it is read.

    metadata    {"mlxdist": "<SHA-256 of the facts and the tensors, as hex> <facts about the tensors, as JSON>"}

It is one entry, because safetensors writes several in an order that changes.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

ENTRY = "mlxdist"
Tensors = Mapping[str, npt.NDArray[Any]]


def seal(tensors: Tensors, about: Mapping[str, object]) -> bytes:
    """Returns the bytes of a file with these tensors and facts."""
    text = json.dumps(about, sort_keys=True)
    return save(dict(tensors), {ENTRY: f"{_digest(tensors, text)} {text}"})


def read_sealed(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Returns the tensors and the facts of a file.

    Raises:
        OSError: it is missing or cannot be read.
        ValueError: its content is not what was written; the message says what is wrong with it.
    """
    if not path.stat().st_size:
        raise ValueError("it is empty")
    try:
        with safe_open(path, framework="numpy") as file:
            digest, _, text = (file.metadata() or {}).get(ENTRY, "").partition(" ")
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    except SafetensorError as error:
        raise ValueError(f"it is cut or overwritten: {error}") from None
    if len(digest) != 64:
        raise ValueError("it has no SHA-256, as it was written by another program or version, or is damaged")
    if _digest(tensors, text) != digest:
        raise ValueError("its SHA-256 is not that of its content")
    about: dict[str, Any] = json.loads(text)
    return tensors, about


def _digest(tensors: Tensors, about: str) -> str:
    """Returns the hash of the facts and, by sorted name, of each tensor with its name, type and shape."""
    found = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        tensor = np.ascontiguousarray(tensors[name])
        found.update(json.dumps([name, tensor.dtype.str, tensor.shape]).encode())
        found.update(tensor.data)
    return found.hexdigest()
