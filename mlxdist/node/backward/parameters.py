"""The trainable parameters of a model: found, replaced for a while, put back."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten


def trainable(module: nn.Module) -> dict[str, mx.array]:
    """The trainable parameters of `module` by name."""
    return dict(tree_flatten(module.trainable_parameters()))


@contextmanager
def swapped(
    model: nn.Module, old: Mapping[str, mx.array], names: Sequence[str], new: Sequence[mx.array]
) -> Iterator[None]:
    """`model` with the arrays `new` (a gradient's tracers, mostly) under `names`; those in `old` are put back."""
    model.update(tree_unflatten(list(zip(names, new, strict=True))))
    try:
        yield
    finally:
        model.update(tree_unflatten([(name, old[name]) for name in names]))
