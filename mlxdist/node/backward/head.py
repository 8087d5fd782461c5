"""The model's own head, on the supervised positions alone.

After the layers a model has its norm, its (tied) output matrix, scaling, softcaps. None of it is written again here:
the model runs once more on the supervised positions, and every layer call is answered from what was recorded. So a
prompt of 4,000 tokens with an answer of 50 costs 50 rows of logits.

Shapes: B rows, L positions, P supervised positions of the flattened B * L, p those of a chunk, D hidden size,
V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxdist.node.backward.record import answer_calls
from mlxdist.node.backward.supervised import Supervised, check_vocabulary

Chunk = tuple[int, int]  # (start, stop) among the supervised positions


def at_positions(hidden: mx.array, positions: mx.array) -> mx.array:
    """Returns the hidden states [..., 1, P, D] at `positions` int32 [P] of the flattened rows of `hidden`.

    `hidden` has the shape [..., B, L, D].
    """
    *outer, rows, length, width = hidden.shape
    return mx.take(hidden.reshape(*outer, 1, rows * length, width), positions, axis=-2)


def log_probs(logits: mx.array, targets: mx.array) -> mx.array:
    """Returns the log softmax of `logits` [P, V], of any float type, at `targets` [P]: float32 [P]."""
    wide = logits.astype(mx.float32)
    return mx.take_along_axis(wide, targets[:, None], axis=-1)[:, 0] - mx.logsumexp(wide, axis=-1)


def chunks(count: int, size: int) -> Iterator[Chunk]:
    """Yields chunks of `size` positions over `count`; the last may be short."""
    return ((start, min(start + size, count)) for start in range(0, count, size))


def head_backward(
    model: nn.Module, results: Sequence[Any], batch: Supervised, hidden: mx.array, chunk: Chunk
) -> tuple[mx.array, mx.array]:
    """Returns log-probs l [p] of one chunk and dl/dh [..., 1, p, D], from `hidden` [..., 1, p, D] there.

    A position's log-prob depends on its own hidden state alone, so one pass serves any loss F: dF/dh = dF/dl * dl/dh.
    """
    targets = batch.targets[chunk[0] : chunk[1]]
    logits = _logits(model, results, batch, hidden, chunk)
    logp = log_probs(logits, targets)
    cotangent = _logits_cotangent(logits, targets, logp)

    def rebuild(h: mx.array) -> list[mx.array]:
        return [_logits(model, results, batch, h, chunk)]

    # Built twice, computed once: the gradient of a matrix product needs no product.
    (dl_dh,) = mx.vjp(rebuild, [hidden], [cotangent])[1]
    return logp, dl_dh


def head_log_probs(
    model: nn.Module, results: Sequence[Any], batch: Supervised, hidden: mx.array, chunk: Chunk
) -> mx.array:
    """Returns the log-probs of `head_backward` alone, with the same bits."""
    return log_probs(_logits(model, results, batch, hidden, chunk), batch.targets[chunk[0] : chunk[1]])


def _logits(model: nn.Module, results: Sequence[Any], batch: Supervised, hidden: mx.array, chunk: Chunk) -> mx.array:
    last = (len(results) - 1, 0)
    ids = batch.ids[None, chunk[0] : chunk[1]]
    logits: mx.array = traced(lambda h: answer_calls(model, ids, results, {last: h}), hidden)
    check_vocabulary(batch, logits.shape[-1])
    return logits.reshape(-1, logits.shape[-1])  # `logits[0]` would be a copy


def _logits_cotangent(logits: mx.array, targets: mx.array, logp: mx.array) -> mx.array:
    """Returns the gradient of `log_probs` by the logits, [p, V]: one at the target, minus the softmax.

    Autograd would hold five matrices of this size at once.
    """
    cotangent = -mx.softmax(logits, axis=-1, precise=True)
    # 1 - p at the target, exact where p is near 1
    cotangent[mx.arange(len(targets)), targets] = (-mx.expm1(logp)).astype(cotangent.dtype)
    return cotangent


def hidden_cotangent(dl_dh: mx.array, row_cotangents: mx.array, batch: Supervised) -> mx.array:
    """Returns dF/dh [..., 1, P, D] from dl/dh and dF/d(row sums) [B]."""
    return (dl_dh * mx.take(row_cotangents, batch.rows)[:, None]).astype(dl_dh.dtype)


def traced(build: Callable[..., Any], *arrays: mx.array) -> Any:
    """Returns `build(*arrays)`, built as inside a gradient but without one: evaluating it frees as it goes.

    Metal's attention and compiled functions take other kernels in a gradient. Values that are compared or combined with
    a gradient's must come from the same kernels.
    """
    made: list[Any] = []

    def trace(*tracers: mx.array) -> list[mx.array]:
        made.append(build(*tracers))
        return [mx.array(0.0)]

    mx.vjp(trace, list(arrays), [mx.array(0.0)])
    return made[0]
