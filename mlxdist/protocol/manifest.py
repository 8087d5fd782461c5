"""The manifest: the adapter's tensors by name and shape, in the one order in which the flat vector holds them.

The order is that of the backward, top layer first, so that a layer's gradients can leave while lower ones compute.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from mlxdist.protocol.messages import TensorSpec
from mlxdist.protocol.vectors import Vector

Manifest = tuple[TensorSpec, ...]


def make(shapes: Mapping[str, tuple[int, ...]]) -> Manifest:
    """The manifest of the named tensors: layers from the top down, names sorted within one; outside layers first."""

    def place(name: str) -> tuple[float, str]:
        number = re.search(r"\.(\d+)\.", name)
        return (-int(number[1]) if number else -math.inf, name)

    return tuple(TensorSpec(name, tuple(shapes[name])) for name in sorted(shapes, key=place))


def size(manifest: Manifest) -> int:
    """Elements of the flat vector."""
    return sum(math.prod(tensor.shape) for tensor in manifest)


def identity(manifest: Manifest) -> str:
    """SHA-256 of names, shapes and order, in hex."""
    return hashlib.sha256(msgspec.json.encode(manifest)).hexdigest()


def split(manifest: Manifest, vector: Vector) -> dict[str, Vector]:
    """Views of the vector's parts by tensor name, in manifest order."""
    tensors, start = {}, 0
    for tensor in manifest:
        stop = start + math.prod(tensor.shape)
        tensors[tensor.name] = vector[start:stop].reshape(tensor.shape)
        start = stop
    return tensors


def join(manifest: Manifest, tensors: Mapping[str, Vector]) -> Vector:
    """The flat vector of the named tensors. Raises KeyError for a missing one, ValueError for another shape."""
    for tensor in manifest:
        if tensors[tensor.name].shape != tensor.shape:
            raise ValueError(f"{tensor.name} has shape {tensors[tensor.name].shape}, the manifest says {tensor.shape}")
    return np.concatenate([np.asarray(tensors[t.name], dtype=np.float32).reshape(-1) for t in manifest])


def differences(mine: Manifest, theirs: Manifest) -> Iterable[str]:
    """The differences between two manifests, as short phrases for the sentence of a refusal."""
    here, there = ({t.name: t.shape for t in m} for m in (mine, theirs))
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            yield f"{name}: {here.get(name, 'absent')} here, {there.get(name, 'absent')} there"
