"""The two files of an adapter, in mlx-lm's layout: written whole, and read back.

    adapters.safetensors    <module>.lora_a, <module>.lora_b, float32: the same tensors give the same bytes
    adapter_config.json     fine_tune_type, num_layers, lora_parameters {rank, scale, dropout, keys}

mlx-lm loads one rank for all modules. Where the ranks differ, every tensor is padded with zeros to the largest, which
changes no product, and `applied_ranks` in the configuration says what to strip when it is read.

Shapes: linear lora_a [in, r], lora_b [r, out]; experts lora_a [experts, r, in], lora_b [experts, out, r].
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from mlxdist.coordinator.storage import peft_layout
from mlxdist.coordinator.storage.peft_read import from_peft, is_peft
from mlxdist.coordinator.storage.run_folder import RunFolder, read_json, saving, write_aside, write_json
from mlxdist.protocol.errors import UserError

if TYPE_CHECKING:
    import mlx.core as mx

Tensor = npt.NDArray[np.float32]


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, object]) -> None:
    """Writes both files into `folder`, made if need be; every tensor is padded to the largest rank.

    Raises SaveError; files from before are kept then.
    """
    run = RunFolder(folder)
    rank = max(applied_ranks({name: tensor.shape for name, tensor in tensors.items()}).values())
    padded = {name: _pad(name, tensor, rank) for name, tensor in tensors.items()}
    with saving(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(run.adapter_config, config)
    write_aside(run.adapters, lambda stream: write_safetensors(stream, padded))


def load_adapter(folder: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Returns an adapter's tensors as float32 with the padding stripped, and its configuration: ours or mlx-lm's.

    The folder may be peft's too: its tensors are then returned in our layout, and a configuration with their scale.

    Raises:
        UserError: there is none, it is not LoRA, or its tensors do not fit its configuration.
    """
    run = RunFolder(folder)
    config = _load_config(run)
    if is_peft(config):
        return _load_peft(folder, config)
    tensors = _read_tensors(folder, run.adapters)
    others = [name for name in tensors if not name.endswith((".lora_a", ".lora_b"))]
    if others or not tensors:
        what = f"holds {others[0]}" if others else "holds no tensor"
        raise UserError(f"{run.adapters} {what}; an adapter to start from has only lora_a and lora_b.")
    try:
        ranks = applied_ranks({name: tensor.shape for name, tensor in tensors.items()})
        wanted = config.get("applied_ranks", ranks)
        if not isinstance(wanted, dict) or wanted.keys() != ranks.keys():
            raise ValueError("applied_ranks does not name the modules that there are tensors of")
        return {name: _strip(name, tensor, int(wanted[_module(name)])) for name, tensor in tensors.items()}, config
    except (ValueError, TypeError, IndexError) as error:
        raise UserError(f"The adapter in {folder} does not fit together: {error}.") from None


def _load_peft(folder: Path, config: dict[str, object]) -> tuple[dict[str, Tensor], dict[str, object]]:
    try:
        tensors, scale = from_peft(_read_tensors(folder, folder / peft_layout.FILE), config)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"The PEFT adapter in {folder} cannot be used: {error}.") from None
    return tensors, {"fine_tune_type": "lora", "lora_parameters": {"scale": scale}}


def _read_tensors(folder: Path, file: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file as float32, by sorted name. Raises UserError."""
    if not file.is_file():
        raise UserError(f"{folder} is no adapter folder: it has no {file.name}.")
    import mlx.core as mx

    try:
        with safe_open(file, framework="numpy"):  # compares the size and all offsets with the header
            loaded = mx.load(str(file))  # not by safetensors, as numpy knows no bfloat16
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read ({error}). Copy it again from its source.") from None
    assert isinstance(loaded, dict)
    return {name: as_float32(loaded[name]) for name in sorted(loaded)}


def applied_ranks(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Returns the rank of every module, by sorted module path, from the shapes of its two tensors.

    Raises:
        ValueError: a module lacks one of its two tensors, or their ranks differ.
    """
    ranks = {}
    for module in sorted({_module(name) for name in shapes}):
        found = {}
        for part in ("lora_a", "lora_b"):
            name = f"{module}.{part}"
            if name not in shapes:
                raise ValueError(f"{name} is missing")
            found[part] = shapes[name][_rank_axis(name, len(shapes[name]))]
        if found["lora_a"] != found["lora_b"]:
            raise ValueError(f"{module} has rank {found['lora_a']} in lora_a and {found['lora_b']} in lora_b")
        ranks[module] = found["lora_a"]
    if not ranks:
        raise ValueError("an adapter needs at least one module")
    return ranks


def as_float32(tensor: "npt.NDArray[np.floating] | mx.array") -> Tensor:
    """Returns the tensor as a contiguous numpy array of float32."""
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor, dtype=np.float32)
    import mlx.core as mx

    return np.array(tensor.astype(mx.float32))


def write_safetensors(stream: BinaryIO, tensors: Mapping[str, Tensor]) -> None:
    """Writes float32 tensors as safetensors, names sorted and metadata fixed, so that bytes depend on values only."""
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for name in sorted(tensors):
        size = tensors[name].nbytes
        header[name] = {
            "dtype": "F32",
            "shape": list(tensors[name].shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the format wants the tensors to begin at a multiple of 8
    stream.write(struct.pack("<Q", len(text)) + text)
    for name in sorted(tensors):
        stream.write(np.ascontiguousarray(tensors[name], dtype="<f4").data)


def _load_config(run: RunFolder) -> dict[str, object]:
    try:
        config = read_json(run.adapter_config)
    except OSError:
        raise UserError(f"{run.path} is no adapter folder: it has no readable {run.adapter_config.name}.") from None
    except ValueError as error:
        raise UserError(f"{run.adapter_config} cannot be used: {error}. Copy it again from its source.") from None
    if is_peft(config):
        return config
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora" or not isinstance(config.get("lora_parameters"), dict):
        raise UserError(
            f"{run.adapter_config} describes no LoRA adapter of mlx-lm or PEFT (fine_tune_type {kind!r}). A run can "
            "start from LoRA only."
        )
    return config


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _rank_axis(name: str, ndim: int) -> int:
    """Returns the axis of the rank: linear and embedding layers [in, r] and [r, out], experts the other way round."""
    first = name.endswith(".lora_b") == (ndim == 2)
    return ndim - 2 if first else ndim - 1


def _pad(name: str, tensor: Tensor, rank: int) -> Tensor:
    axis = _rank_axis(name, tensor.ndim)
    if tensor.shape[axis] == rank:
        return tensor
    widths = [(0, 0)] * tensor.ndim
    widths[axis] = (0, rank - tensor.shape[axis])
    return np.pad(tensor, widths)


def _strip(name: str, tensor: Tensor, rank: int) -> Tensor:
    kept, padding = np.split(tensor, [rank], axis=_rank_axis(name, tensor.ndim))
    if kept.shape[_rank_axis(name, tensor.ndim)] != rank or padding.any():
        raise ValueError(f"{name} has {tensor.shape} and values beyond its applied rank {rank}")
    return np.ascontiguousarray(kept)
