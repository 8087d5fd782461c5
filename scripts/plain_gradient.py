"""The reference for every path of the backward: nn.value_and_grad over the logits of all positions."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlxdist.node.backward.backward import MicroBatch
from mlxdist.node.backward.events import Loss


def plain_gradient(
    model: nn.Module, batches: Sequence[MicroBatch], loss: Loss, key: int | None = None
) -> tuple[mx.array, dict[str, mx.array]]:
    """Returns the loss and its gradient by parameter name."""
    model.train()
    if key is not None:
        mx.random.seed(key)
    value, gradients = nn.value_and_grad(model, lambda: loss([plain_sums(model, batch) for batch in batches]))()
    mx.eval(value, gradients)
    return value, dict(tree_flatten(gradients))


def plain_sums(model: nn.Module, batch: MicroBatch) -> mx.array:
    """Returns the row sums [B] of the target log-probs."""
    logits = model(mx.array(batch.inputs)).astype(mx.float32)
    return -(nn.losses.cross_entropy(logits, mx.array(batch.targets)) * mx.array(batch.mask)).sum(axis=1)


def padded_rows(seed: int, lengths: Sequence[int], targets: Sequence[int], vocabulary: int) -> MicroBatch:
    """Returns random rows of `lengths` tokens, padded on the right; the last `targets[b]` of each are targets."""
    draw = np.random.default_rng(seed)
    width = max(lengths)
    ids = np.zeros((len(lengths), width), np.int32)
    mask = np.zeros((len(lengths), width), np.float32)
    for row, (length, count) in enumerate(zip(lengths, targets, strict=True)):
        ids[row, :length] = draw.integers(1, vocabulary, length)
        mask[row, length - count : length] = 1
    return MicroBatch(ids[:, :-1], ids[:, 1:], mask[:, 1:])


def furthest(got: dict[str, mx.array], expected: dict[str, mx.array]) -> float:
    """Returns the largest relative distance (2-norm) of a parameter's gradient; tiny ones are relative to the whole."""
    assert got.keys() == expected.keys()
    whole = float(np.sqrt(sum(float((np.array(value) ** 2).sum()) for value in expected.values())))
    return max(
        float(np.linalg.norm(np.array(got[name]) - np.array(value)))
        / max(float(np.linalg.norm(np.array(value))), 1e-3 * whole)
        for name, value in expected.items()
    )
