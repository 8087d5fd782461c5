"""The comparison of two ways to compute the same, on a model that is about to be trained."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlxdist.node.backward.parameters import swapped, trainable

# The largest distance of two orders of the same sum, relative to the whole, by the coarsest type of the model.
TOLERANCE = {mx.float32: 1e-4, mx.float16: 2e-2, mx.bfloat16: 1e-1}
SEED = 20


@contextmanager
def moved(model: nn.Module) -> Iterator[None]:
    """Moves the trainable parameters of `model` a little; restores them on leaving.

    lora_b starts at zero, where half of the gradient vanishes and no difference would show.
    """
    parameters = trainable(model)
    keys = mx.random.split(mx.random.key(SEED), max(len(parameters), 1))
    values = [
        (value + 0.05 * mx.random.normal(value.shape, key=key)).astype(value.dtype)
        for value, key in zip(parameters.values(), keys, strict=False)
    ]
    with swapped(model, parameters, list(parameters), values):
        yield


def distance(expected: Mapping[str, mx.array], got: Mapping[str, mx.array]) -> float:
    """Returns the larger of the relative distances (2-norm) of the "row sums" and of all other values together."""
    if expected.keys() != got.keys():
        return math.inf
    sums = {"row sums"}
    groups = [names for names in (sums, expected.keys() - sums) if names]
    return max(relative([expected[k] for k in names], [got[k] for k in names]) for names in groups)


def relative(expected: Sequence[mx.array], got: Sequence[mx.array]) -> float:
    """Returns the distance of some arrays from the expected ones, relative to these (2-norm); inf for NaN or Inf."""

    def squares(arrays: Sequence[mx.array]) -> float:
        return math.fsum(float(np.square(np.asarray(array.astype(mx.float32), np.float64)).sum()) for array in arrays)

    size, away = squares(expected), squares([a - b for a, b in zip(expected, got, strict=True)])
    if not math.isfinite(size) or not math.isfinite(away):
        return math.inf
    return math.sqrt(away / size) if size else math.sqrt(away)


def coarsest(model: nn.Module) -> mx.Dtype:
    """Returns the coarsest of the floating types of a model's parameters."""
    types = {value.dtype for value in dict(tree_flatten(model.parameters())).values()}
    return next((kind for kind in (mx.bfloat16, mx.float16) if kind in types), mx.float32)


def in_short(error: Exception) -> str:
    """Returns the kind and the text of an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
