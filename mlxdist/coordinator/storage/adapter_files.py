"""The adapter as mlx-lm's own files, out and in.

    adapters.safetensors    <module>.lora_a, <module>.lora_b, float32: the same tensors give the same bytes
    adapter_config.json     fine_tune_type, num_layers, lora_parameters {rank, scale, dropout, keys}

mlx-lm loads one rank for all modules. Where ours differ, every tensor is padded with zeros to the largest, which
changes no product, and `applied_ranks` beside it says what to strip on the way in.

Shapes: linear lora_a [in, r], lora_b [r, out]; experts lora_a [experts, r, in], lora_b [experts, out, r].
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import numpy.typing as npt

from mlxdist.coordinator.storage.run_folder import RunFolder, saving, write_aside, write_json
from mlxdist.protocol.errors import UserError

if TYPE_CHECKING:
    import mlx.core as mx

Tensor = npt.NDArray[np.float32]


def export_adapter(
    folder: Path,
    tensors: "Mapping[str, npt.NDArray[np.floating] | mx.array]",
    *,
    base_model: str,
    num_layers: int,
    scale: float,
    dropout: float = 0.0,
    keys: Sequence[str] | None = None,
) -> None:
    """Write an adapter that mlx_lm.load(adapter_path=folder) takes.

    Args:
        folder: made if need be.
        tensors: the trainable tensors by their full names in the model, `….lora_a` and `….lora_b`, unpadded.
        base_model: what the adapter belongs to, as given to mlx_lm.load.
        num_layers: the last N layers have LoRA; -1 means all.
        scale: what the LoRA product is multiplied by (mlx-lm's scale, not alpha).
        dropout: of the LoRA input while training.
        keys: module paths as mlx-lm wants them; by default taken from the tensors' names (see `module_keys`).

    Raises:
        SaveError: a file could not be written; those from before are kept.
    """
    if num_layers == 0:
        raise ValueError("num_layers 0 would mean all layers to mlx-lm; give -1 for all")
    ranks = applied_ranks(tensors)
    rank = max(ranks.values())
    config: dict[str, object] = {
        "fine_tune_type": "lora",
        "model": base_model,
        "num_layers": num_layers,
        "lora_parameters": {
            "rank": rank,
            "scale": scale,
            "dropout": dropout,
            "keys": sorted(module_keys(ranks) if keys is None else keys),
        },
    }
    if set(ranks.values()) != {rank}:
        config["applied_ranks"] = ranks
    padded = {name: _pad(name, _as_float32(tensor), rank) for name, tensor in tensors.items()}
    run = RunFolder(folder)
    with saving(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(run.adapter_config, config)
    write_aside(run.adapters, lambda stream: write_safetensors(stream, padded))


def load_adapter(folder: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Read an adapter of ours or of mlx-lm: the tensors as float32 with the padding stripped, and its configuration.

    Raises:
        UserError: there is none, it is not LoRA, or its tensors do not fit its configuration.
    """
    run = RunFolder(folder)
    config = _read_config(run)
    if not run.adapters.is_file():
        raise UserError(f"{folder} is no adapter folder: it has no {run.adapters.name}.")
    import mlx.core as mx

    try:
        loaded = mx.load(str(run.adapters))
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{run.adapters} cannot be read ({error}). Copy it again from where it came.") from None
    assert isinstance(loaded, dict)
    tensors = {name: _as_float32(loaded[name]) for name in sorted(loaded)}
    strangers = [name for name in tensors if not name.endswith((".lora_a", ".lora_b"))]
    if strangers or not tensors:
        what = f"holds {strangers[0]}" if strangers else "holds no tensor"
        raise UserError(f"{run.adapters} {what}; an adapter to start from has only lora_a and lora_b.")
    try:
        ranks = applied_ranks(tensors)
        wanted = config.get("applied_ranks", ranks)
        if not isinstance(wanted, dict) or wanted.keys() != ranks.keys():
            raise ValueError("applied_ranks does not name the modules that there are tensors of")
        return {name: _strip(name, tensor, int(wanted[_module(name)])) for name, tensor in tensors.items()}, config
    except ValueError as error:
        raise UserError(f"The adapter in {folder} does not fit together: {error}.") from None


def applied_ranks(tensors: "Mapping[str, npt.NDArray[np.floating] | mx.array]") -> dict[str, int]:
    """The rank of every module, by sorted module path.

    Raises:
        ValueError: a module lacks one of its two tensors, or their ranks differ.
    """
    ranks = {}
    for module in sorted({_module(name) for name in tensors}):
        found = {}
        for part in ("lora_a", "lora_b"):
            name = f"{module}.{part}"
            if name not in tensors:
                raise ValueError(f"{name} is missing")
            found[part] = int(tensors[name].shape[_rank_axis(name, tensors[name].ndim)])
        if found["lora_a"] != found["lora_b"]:
            raise ValueError(f"{module} has rank {found['lora_a']} in lora_a and {found['lora_b']} in lora_b")
        ranks[module] = found["lora_a"]
    if not ranks:
        raise ValueError("an adapter needs at least one module")
    return ranks


def module_keys(modules: Iterable[str]) -> set[str]:
    """Module paths in mlx-lm's form: relative to the layer inside a layer, whole where a module is in no layer.

    `model.layers.3.self_attn.q_proj` gives `self_attn.q_proj`, `lm_head` stays: mlx-lm looks keys up in each of the
    last layers, then once in the whole model.
    """
    keys = set()
    for module in modules:
        parts = module.split(".")
        index = next((place for place, part in enumerate(parts) if part.isdigit()), -1)
        keys.add(".".join(parts[index + 1 :]))
    return keys


def write_safetensors(stream: BinaryIO, tensors: Mapping[str, Tensor]) -> None:
    """Write float32 tensors as safetensors, names sorted and metadata fixed, so that bytes depend on values only."""
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


def _read_config(run: RunFolder) -> dict[str, object]:
    try:
        config = json.loads(run.adapter_config.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{run.path} is no adapter folder: it has no readable {run.adapter_config.name}.") from None
    except ValueError as error:
        raise UserError(f"{run.adapter_config} is not JSON: {error}.") from None
    kind = config.get("fine_tune_type", "lora") if isinstance(config, dict) else None
    if kind != "lora" or not isinstance(config.get("lora_parameters"), dict):
        raise UserError(
            f"{run.adapter_config} describes no LoRA adapter of mlx-lm (fine_tune_type {kind!r}). Only LoRA can be "
            "started from; a PEFT adapter has to be converted first."
        )
    assert isinstance(config, dict)
    return config


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _rank_axis(name: str, ndim: int) -> int:
    """Which axis of a tensor is the rank: linear and embedding layers [in, r] and [r, out], experts the other way."""
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


def _as_float32(tensor: "npt.NDArray[np.floating] | mx.array") -> Tensor:
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor, dtype=np.float32)
    import mlx.core as mx

    return np.array(tensor.astype(mx.float32))
