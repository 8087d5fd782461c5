"""The gradient of a leaf of the self-check, and an optimizer step with it, as a node computes them."""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from mlxdist.node.backward.backward import WHOLE, Batch, GradientPath, backward
from mlxdist.node.backward.choose_packing import PackingChoice
from mlxdist.node.backward.events import gathered
from mlxdist.node.work.objective import passes
from mlxdist.protocol.leaves import Leaf
from mlxdist.protocol.packing import APART

Gradient = Mapping[str, mx.array]  # "row sums" [R], and the gradient of each trained tensor

HEAD_CHUNK = 16
TOGETHER, EACH_ROW = PackingChoice(), PackingChoice(APART)


def leaf_gradient(
    model: nn.Module, batches: Sequence[Batch], path: GradientPath = WHOLE, head_chunk: int = HEAD_CHUNK
) -> dict[str, mx.array]:
    """Returns the row sums of all batches and the gradient of their negative sum, evaluated."""
    events = backward(model, batches, negative_sum, head_chunk=head_chunk, path=path, dropout_key=0)
    sums, gradients = gathered(events)
    found = {"row sums": mx.concatenate(sums), **gradients}
    mx.eval(found)
    return found


def train_step(
    model: nn.Module, optimizer: Any, leaf: Leaf, path: GradientPath = WHOLE, head_chunk: int = HEAD_CHUNK
) -> float:
    """Takes one step on the packed rows of a leaf. Returns the mean loss of its targets."""
    found = leaf_gradient(model, passes(leaf, TOGETHER), path, head_chunk)
    sums = found.pop("row sums")
    count = sum(int(row.targets.sum()) for row in leaf.rows)
    optimizer.update(model, tree_unflatten([(name, value / count) for name, value in found.items()]))
    mx.eval(model.trainable_parameters(), optimizer.state)
    return -float(np.array(sums, np.float64).sum()) / count


def negative_sum(sums: list[mx.array]) -> mx.array:
    """Returns the loss of the self-check, from the row sums of all batches."""
    return -mx.concatenate(sums).sum()
