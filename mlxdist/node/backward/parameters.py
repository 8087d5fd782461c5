"""The trainable parameters of a model: found, replaced for a while, restored."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten


def trainable(module: nn.Module) -> dict[str, mx.array]:
    """Returns the trainable parameters of `module` by name."""
    return dict(tree_flatten(module.trainable_parameters()))


@contextmanager
def swapped(
    model: nn.Module, old: Mapping[str, mx.array], names: Sequence[str], new: Sequence[mx.array]
) -> Iterator[None]:
    """Puts the arrays `new`, mostly a gradient's tracers, into `model` under `names`; restores `old` on leaving."""
    put(model, names, new)
    try:
        yield
    finally:
        put(model, names, [old[name] for name in names])


def put(model: nn.Module, names: Sequence[str], values: Sequence[mx.array]) -> None:
    """Puts parameters into `model` by name.

    `Module.update` visits every module, which took a fifth of the time in which a graph is built.
    """
    for name, value in zip(names, values, strict=True):
        *path, last = name.split(".")
        owner: Any = model
        for part in path:
            owner = owner[int(part)] if isinstance(owner, list) else owner[part]
        owner[last] = value
