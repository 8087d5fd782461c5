"""The works of scripts/bench_growth.py at a node: the gradients of leaves.

This module imports mlx, so OpenBLAS and the environment must be set before.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from mlxdist.node.backward.backward import GradientPath
from mlxdist.node.backward.layout import pack
from mlxdist.node.selfcheck import models
from mlxdist.node.selfcheck.gradients import TOGETHER, leaf_gradient
from mlxdist.node.selfcheck.rows import pairs_leaf, rows_leaf
from mlxdist.node.work.objective import passes
from mlxdist.protocol.leaves import Leaf

Run = Callable[[], object]  # does its work to the end
Prepare = Callable[[int], Run]

LAYERS, HEAD_DIM, VOCABULARY, HEAD_CHUNK = 2, 32, 512, 128
SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 128,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 256,
        "num_attention_heads": 1,  # few scores: their memory grows with the square of a row
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
    }
)
ROW, SHORT = 64, 8  # tokens of the rows where their number grows


@dataclass(frozen=True)
class Work:
    """A work that is measured at growing sizes."""

    prepare: Prepare  # for a size; what it does is not measured
    unit: str
    power: int = 1  # with which it may grow: 2 of a row's attention


def node_works() -> dict[str, Work]:
    """Returns the gradients of leaves."""
    whole, cut_up = GradientPath(), GradientPath(segment_size=1)
    alone = "its attention left out"
    return {
        "gradient of one row, whole graph": Work(partial(one_row, whole), "tokens", 2),
        f"gradient of one row, whole graph, {alone}": Work(without_attention(partial(one_row, whole)), "tokens"),
        "gradient of one row, segment 1": Work(partial(one_row, cut_up), "tokens", 2),
        f"gradient of one row, segment 1, {alone}": Work(without_attention(partial(one_row, cut_up)), "tokens"),
        f"gradient of rows of {ROW} tokens, packed": Work(partial(rows, ROW, whole), "tokens"),
        f"gradient of rows of {SHORT} tokens, packed": Work(partial(rows, SHORT, whole), "tokens"),
        f"gradient of rows of {SHORT} tokens, packed, segment 1": Work(partial(rows, SHORT, cut_up), "tokens"),
        "gradient of pairs of 40 + 12 + 12 tokens": Work(pairs, "tokens"),
        f"gradient of a hybrid's row, in chunks, {alone}": Work(without_attention(hybrid_row), "tokens"),
        f"packing rows of {SHORT} tokens into a leaf": Work(packing, "tokens"),
    }


def one_row(path: GradientPath, tokens: int) -> Run:
    """The gradient of one row."""
    return _gradient(models.dense(**SIZES), rows_leaf([tokens + 1], VOCABULARY), path)


def rows(length: int, path: GradientPath, tokens: int) -> Run:
    """The gradient of rows of `length` inputs, packed: their attention grows with their number."""
    return _gradient(models.dense(**SIZES), rows_leaf([length + 1] * (tokens // length), VOCABULARY), path)


def pairs(tokens: int) -> Run:
    """The gradient of packed pairs that share prompts."""
    return _gradient(models.dense(**SIZES), pairs_leaf(max(tokens // 64, 1), 40, 12, VOCABULARY), GradientPath())


def hybrid_row(tokens: int) -> Run:
    """The gradient of one row of a hybrid of three gated-delta layers and one with attention."""
    model = models.hybrid(vocab_size=VOCABULARY)
    return _gradient(model, rows_leaf([tokens + 1], VOCABULARY), GradientPath(chunked=True))


def without_attention(prepare: Prepare) -> Prepare:
    """Returns the same work with a sum in the place of attention, so that what else grows with the square is seen."""

    def summed(q: mx.array, k: mx.array, v: mx.array, **_: Any) -> mx.array:
        return q + (k + v).mean(axis=1, keepdims=True)

    def prepared(size: int) -> Run:
        run = prepare(size)

        def run_without() -> None:
            before = mx.fast.scaled_dot_product_attention
            mx.fast.scaled_dot_product_attention = summed  # mlx-lm's models look it up when they call
            try:
                run()
            finally:
                mx.fast.scaled_dot_product_attention = before

        return run_without

    return prepared


def packing(tokens: int) -> Run:
    """The layout of a leaf's rows."""
    leaf = rows_leaf([SHORT + 1] * (tokens // SHORT), VOCABULARY)
    items = [(row,) for row in leaf.rows]
    return lambda: mx.eval(pack(items).inputs)


def _gradient(model: Any, leaf: Leaf, path: GradientPath) -> Run:
    batches = passes(leaf, TOGETHER)
    return lambda: leaf_gradient(model, batches, path, HEAD_CHUNK)
