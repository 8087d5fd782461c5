"""The named function `export_adapter`: an adapter that mlx-lm loads, from tensors and a few numbers."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mlxdist.coordinator.storage.adapter_files import applied_ranks, as_float32, write_adapter

if TYPE_CHECKING:
    import mlx.core as mx


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
        base_model: the model that the adapter belongs to, as given to mlx_lm.load.
        num_layers: the last N layers have LoRA; -1 means all.
        scale: factor on the LoRA product (mlx-lm's scale, not alpha).
        dropout: of the LoRA input while training.
        keys: module paths as mlx-lm wants them; by default taken from the tensors' names (see `module_keys`).

    Raises:
        ValueError: `num_layers` is 0, or the tensors are not pairs of one rank.
        SaveError: a file could not be written; those from before are kept.
    """
    if num_layers == 0:
        raise ValueError("num_layers 0 would mean all layers to mlx-lm; give -1 for all")
    ranks = applied_ranks({name: tensor.shape for name, tensor in tensors.items()})
    config: dict[str, object] = {
        "fine_tune_type": "lora",
        "model": base_model,
        "num_layers": num_layers,
        "lora_parameters": {
            "rank": max(ranks.values()),
            "scale": scale,
            "dropout": dropout,
            "keys": sorted(module_keys(ranks) if keys is None else keys),
        },
    }
    if len(set(ranks.values())) > 1:
        config["applied_ranks"] = ranks
    write_adapter(folder, {name: as_float32(tensor) for name, tensor in tensors.items()}, config)


def module_keys(modules: Iterable[str]) -> set[str]:
    """Returns module paths in mlx-lm's form: relative to the layer inside a layer, whole for a module outside.

    `model.layers.3.self_attn.q_proj` gives `self_attn.q_proj`, `lm_head` stays: mlx-lm looks keys up in each of the
    last layers, then once in the whole model.
    """
    keys = set()
    for module in modules:
        parts = module.split(".")
        index = next((place for place, part in enumerate(parts) if part.isdigit()), -1)
        keys.add(".".join(parts[index + 1 :]))
    return keys
