"""The two forms that make training fast, beside the plain ones: rows packed into one, gated-delta layers in chunks.

Each is measured in turns with the plain form on this device, and their gradients are compared.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import mlx.nn as nn

from mlxdist.node.backward.backward import WHOLE, GradientPath
from mlxdist.node.backward.choose_path import choose_path
from mlxdist.node.backward.comparison import distance
from mlxdist.node.selfcheck import models
from mlxdist.node.selfcheck.gradients import EACH_ROW, TOGETHER, leaf_gradient
from mlxdist.node.selfcheck.rows import pairs_leaf, rows_leaf
from mlxdist.node.selfcheck.training import HEAD_CHUNK, SIZES
from mlxdist.node.selfcheck.turns import in_turns
from mlxdist.node.work.objective import passes
from mlxdist.protocol.leaves import Leaf

ROWS = (48,) * 8  # tokens
PAIRS = (2, 160, 40)  # pairs, tokens of a prompt, of a response
HYBRID_TOKENS = 512
HYBRID_SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 256,
        "intermediate_size": 512,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "head_dim": 64,
    }
)


def packed_rows(
    seconds: float,
    sizes: Mapping[str, Any] = SIZES,
    rows: Sequence[int] = ROWS,
    pairs: tuple[int, int, int] = PAIRS,
) -> dict[str, Any]:
    """Compares the gradient of packed rows with that of each row alone, for short rows and for pairs.

    Returns:
        "rows" and "pairs": each the result of `compared`, and "distance", that of the two gradients.
    """
    model = models.dense(**sizes)
    leaves = {"rows": rows_leaf(rows, sizes["vocab_size"]), "pairs": pairs_leaf(*pairs, sizes["vocab_size"])}
    return {name: _packed(model, leaf, seconds / len(leaves)) for name, leaf in leaves.items()}


def chunked(seconds: float, sizes: Mapping[str, Any] = HYBRID_SIZES, tokens: int = HYBRID_TOKENS) -> dict[str, Any]:
    """Compares a small hybrid's gradient with its gated-delta layers in chunks and token by token, as mlx-lm has it.

    Returns:
        The result of `compared`, "tokens", and "distance", that of the two gradients. Where a run would not use chunks
        on this device, only "reason".
    """
    model = models.hybrid(**sizes)
    path = choose_path(model, chunked=True)
    if not path.chunked:
        return {"reason": path.reason}
    batches = passes(rows_leaf([tokens + 1], models.VOCABULARY), TOGETHER)
    plain, ours = (partial(leaf_gradient, model, batches, each, HEAD_CHUNK) for each in (WHOLE, path))
    found = in_turns({"token by token": plain, "in chunks": ours}, seconds)
    return {**found, "tokens": tokens, "distance": distance(plain(), ours())}


def _packed(model: nn.Module, leaf: Leaf, seconds: float) -> dict[str, Any]:
    plain, ours = (
        partial(leaf_gradient, model, passes(leaf, choice), GradientPath(), HEAD_CHUNK)
        for choice in (EACH_ROW, TOGETHER)
    )
    found = in_turns({"each row": plain, "packed": ours}, seconds)
    return {**found, "distance": distance(plain(), ours())}
