"""The trainable parameters of a model: found, replaced for a while, restored."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten


def trainable(module: nn.Module) -> dict[str, mx.array]:
    """Returns the trainable parameters of `module` by name."""
    return dict(tree_flatten(module.trainable_parameters()))


@contextmanager
def swapped(
    model: nn.Module, old: Mapping[str, mx.array], names: Sequence[str], new: Sequence[mx.array]
) -> Iterator[None]:
    """Puts the arrays `new`, mostly a gradient's tracers, into `model` under `names`; restores `old` on leaving."""
    model.update(tree_unflatten(list(zip(names, new, strict=True))))
    try:
        yield
    finally:
        model.update(tree_unflatten([(name, old[name]) for name in names]))
