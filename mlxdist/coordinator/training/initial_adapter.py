"""The first values of the adapter: random ones, or those of an earlier adapter."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlxdist.coordinator.storage.adapter_files import load_adapter
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol.errors import ConfigError
from mlxdist.protocol.manifest import Manifest
from mlxdist.protocol.vectors import Vector


def draw(manifest: Manifest, seed: int) -> Vector:
    """Returns a new adapter: A from uniform(-1/sqrt(in), 1/sqrt(in)), B zero, so that it changes nothing yet.

    `seed` gives one key per A tensor, split over the sorted names: the values do not depend on the manifest's order.
    """
    names = sorted(tensor.name for tensor in manifest if tensor.name.endswith("lora_a"))
    shapes = {tensor.name: tensor.shape for tensor in manifest}
    tensors = {tensor.name: np.zeros(tensor.shape, np.float32) for tensor in manifest}
    with mx.stream(mx.cpu):
        for name, key in zip(names, mx.random.split(mx.random.key(seed), max(len(names), 1)), strict=False):
            shape = shapes[name]
            # Linear layers hold A as (in, r), experts as (experts, r, in).
            bound = 1 / math.sqrt(shape[0] if len(shape) == 2 else shape[-1])
            tensors[name] = np.array(mx.random.uniform(-bound, bound, shape, key=key))
    return manifests.join(manifest, tensors)


def start_from(folder: Path, manifest: Manifest, scale: float) -> Vector:
    """Returns the vector of a saved adapter. Raises ConfigError for tensors or a scale that this run does not have.

    The scale is a factor on the adapter's output: under another one the same tensors are another model.
    """
    tensors, config = load_adapter(folder)
    theirs_scale = config["lora_parameters"].get("scale", scale)  # type: ignore[attr-defined]  # checked: a table
    if theirs_scale != scale:
        raise ConfigError(
            f"lora.init_adapter = {str(folder)!r} was trained with scale {theirs_scale}, and lora.scale is {scale}: "
            f"under another scale it is another model; set lora.scale = {theirs_scale}"
        )
    names = {tensor.name for tensor in manifest}
    tensors = {_known(name, names): tensor for name, tensor in tensors.items()}
    theirs = manifests.make({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    if theirs != manifest:
        what = "; ".join(list(manifests.differences(manifest, theirs))[:3])
        raise ConfigError(f"lora.init_adapter = {str(folder)!r} does not fit this run's LoRA layers: {what}")
    return manifests.join(manifest, tensors)


def _known(name: str, names: Collection[str]) -> str:
    """Returns the name that a tensor of experts has here: transformers calls Mixtral's block of experts mlp."""
    other = name.replace(".mlp.switch_mlp.", ".block_sparse_moe.switch_mlp.")
    return other if name not in names and other in names else name


def tensors_of(manifest: Manifest, adapter: Vector) -> Mapping[str, Vector]:
    """Returns the tensors of an adapter by name, as they are saved."""
    return manifests.split(manifest, adapter)
