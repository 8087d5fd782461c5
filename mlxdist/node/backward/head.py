"""The model's own head, on the positions that count and on nothing else.

After the layers a model has its norm, its (tied) output matrix, scaling, softcaps. None of it is written again here:
the model runs once more on the picked positions with every layer call answered from what was recorded. So a prompt of
4,000 tokens with an answer of 50 costs 50 rows of logits.

Shapes: B rows, L positions, P picked positions of the flattened B * L, p those of a chunk, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxdist.node.backward.record import answer_calls
from mlxdist.node.backward.supervised import Picks, check_vocabulary

Span = tuple[int, int]  # (start, end) of a chunk among the picked positions


def pick(hidden: mx.array, positions: mx.array) -> mx.array:
    """The hidden states [..., 1, P, D] at `positions` int32 [P] of the flattened rows of `hidden` [..., B, L, D]."""
    *outer, rows, length, width = hidden.shape
    return mx.take(hidden.reshape(*outer, 1, rows * length, width), positions, axis=-2)


def log_probs(logits: mx.array, targets: mx.array) -> mx.array:
    """The log softmax of `logits` [P, V], of any float type, at `targets` [P]: float32 [P]."""
    wide = logits.astype(mx.float32)
    return mx.take_along_axis(wide, targets[:, None], axis=-1)[:, 0] - mx.logsumexp(wide, axis=-1)


def chunks(count: int, size: int) -> Iterator[Span]:
    """Runs of `size` positions over `count`; the last may be short."""
    return ((start, min(start + size, count)) for start in range(0, count, size))


def head_pass(
    model: nn.Module, results: Sequence[Any], picks: Picks, hidden: mx.array, span: Span
) -> tuple[mx.array, mx.array]:
    """Log-probs l [p] of the picked positions `span` and dl/dh [..., 1, p, D], from `hidden` [..., 1, p, D] there.

    A position's log-prob depends on its own hidden state alone, so one pass serves any loss F: dF/dh = dF/dl * dl/dh.
    """
    targets = picks.targets[span[0] : span[1]]
    logits = _logits(model, results, picks, hidden, span)
    logp = log_probs(logits, targets)
    slope = _slope(logits, targets, logp)

    def again(h: mx.array) -> list[mx.array]:
        return [_logits(model, results, picks, h, span)]

    # Built twice, computed once: the gradient of a matrix product needs no product.
    (pull,) = mx.vjp(again, [hidden], [slope])[1]
    return logp, pull


def head_score(model: nn.Module, results: Sequence[Any], picks: Picks, hidden: mx.array, span: Span) -> mx.array:
    """The log-probs of `head_pass` alone, with the same bits."""
    return log_probs(_logits(model, results, picks, hidden, span), picks.targets[span[0] : span[1]])


def _logits(model: nn.Module, results: Sequence[Any], picks: Picks, hidden: mx.array, span: Span) -> mx.array:
    last = (len(results) - 1, 0)
    ids = picks.ids[None, span[0] : span[1]]
    logits: mx.array = traced(lambda h: answer_calls(model, ids, results, {last: h}), hidden)
    check_vocabulary(picks, logits.shape[-1])
    return logits.reshape(-1, logits.shape[-1])  # `logits[0]` would be a copy


def _slope(logits: mx.array, targets: mx.array, logp: mx.array) -> mx.array:
    """The gradient of `log_probs` by the logits, [p, V]: one at the target, minus the softmax.

    Autograd would hold five matrices of this size at once.
    """
    slope = -mx.softmax(logits, axis=-1, precise=True)
    slope[mx.arange(len(targets)), targets] = (-mx.expm1(logp)).astype(slope.dtype)  # 1 - p, exact where p is near 1
    return slope


def scaled(pull: mx.array, slope: mx.array, picks: Picks) -> mx.array:
    """The gradient dF/dh [..., 1, P, D] from dl/dh and dF/d(row sum) [B]."""
    return (pull * mx.take(slope, picks.rows)[:, None]).astype(pull.dtype)


def traced(build: Callable[..., Any], *arrays: mx.array) -> Any:
    """What `build(*arrays)` returns, built as inside a gradient but without one: evaluating it frees as it goes.

    Metal's attention and compiled functions take other kernels in a gradient; what is compared or put together with a
    gradient's numbers must take the same.
    """
    made: list[Any] = []

    def trace(*tracers: mx.array) -> list[mx.array]:
        made.append(build(*tracers))
        return [mx.array(0.0)]

    mx.vjp(trace, list(arrays), [mx.array(0.0)])
    return made[0]
