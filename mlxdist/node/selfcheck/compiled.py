"""`mx.compile` around a leaf's gradient, beside the graph that is built for each leaf. mlxdist does not use it.

A compiled function is made for the shapes of one leaf, and its kernels may round in another way. So a Mac would have
to win more by it than making it for each leaf costs, and with the same bits.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxdist.node.backward.comparison import distance, in_short
from mlxdist.node.backward.full_graph import full_graph
from mlxdist.node.backward.packing import packed
from mlxdist.node.backward.parameters import swapped, trainable
from mlxdist.node.backward.supervised import Supervised
from mlxdist.node.selfcheck import models
from mlxdist.node.selfcheck.gradients import TOGETHER, Gradient, negative_sum
from mlxdist.node.selfcheck.rows import rows_leaf
from mlxdist.node.selfcheck.training import HEAD_CHUNK, SIZES
from mlxdist.node.selfcheck.turns import in_turns
from mlxdist.node.work.objective import passes

ROWS = (48,) * 4  # tokens: short rows, for which building weighs most

Graph = Callable[[], Gradient]  # not evaluated


def compiled(seconds: float, sizes: Mapping[str, Any] = SIZES, rows: Sequence[int] = ROWS) -> dict[str, Any]:
    """Compares the gradient of one leaf, built each time, with the same one compiled.

    Returns:
        The result of `compared`, "distance", that of the two gradients, "same_bits", "building_seconds" of the graph,
        and "compiling_seconds", what the first compiled gradient of a leaf takes more than the next one. Where this
        machine cannot compile (on Linux MLX calls g++), only "reason".
    """
    model = models.dense(**sizes)
    (batch,) = passes(rows_leaf(rows, sizes["vocab_size"]), TOGETHER)
    plain = partial(_graph, model, batch)
    fast = _compiled(model, batch)
    try:
        first = _seconds(fast)
    except RuntimeError as error:
        return {"reason": in_short(error)}
    second = _seconds(fast)
    found = in_turns({"built": partial(_evaluated, plain), "compiled": partial(_evaluated, fast)}, seconds)
    began = time.perf_counter()
    plain()
    building = time.perf_counter() - began
    ours, theirs = _evaluated(plain), _evaluated(fast)
    return {
        **found,
        "distance": distance(ours, theirs),
        "same_bits": all(np.array_equal(ours[name], theirs[name]) for name in ours),
        "building_seconds": building,
        "compiling_seconds": first - second,
    }


def _graph(model: nn.Module, batch: Supervised) -> Gradient:
    with packed(model, batch.packing):
        sums, gradients = full_graph(model, [batch], negative_sum, head_chunk=HEAD_CHUNK, supervised_head=True)
    return {"row sums": mx.concatenate(sums), **gradients}


def _compiled(model: nn.Module, batch: Supervised) -> Graph:
    """Returns the compiled graph of a leaf; all that changes between leaves of the same shapes is its arguments."""
    parameters = trainable(model)

    def graph(values: list[mx.array], arrays: list[mx.array]) -> Gradient:
        inputs, positions, ids, targets, rows = arrays
        given = replace(batch, inputs=inputs, positions=positions, ids=ids, targets=targets, rows=rows)
        with swapped(model, parameters, list(parameters), values):
            return _graph(model, given)

    arrays = [batch.inputs, batch.positions, batch.ids, batch.targets, batch.rows]
    return partial(mx.compile(graph), list(parameters.values()), arrays)


def _evaluated(graph: Graph) -> Gradient:
    gradient = graph()
    mx.eval(gradient)
    return gradient


def _seconds(graph: Graph) -> float:
    began = time.perf_counter()
    _evaluated(graph)
    return time.perf_counter() - began
