"""The whole-graph path: every layer's activations live until its backward. The fastest where they fit.

The head is not part of that graph: one pass over it gives each position's log-prob l and dl/dh, and the layers receive
dF/dl * dl/dh. Chunks are chained so that only one chunk of logits is alive at a time.

Shapes: B rows, P picked positions, D hidden size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxdist.node.backward.head import chunks, head_pass, head_score, log_probs, pick, scaled, traced
from mlxdist.node.backward.parameters import swapped, trainable
from mlxdist.node.backward.record import record
from mlxdist.node.backward.supervised import Picks, check_vocabulary, row_sums

Loss = Callable[[list[mx.array]], mx.array]  # row sums [B] of each micro-batch -> the scalar sum of the losses


def whole_gradient(
    model: nn.Module, batches: Sequence[Picks], loss: Loss, *, head_chunk: int, picked: bool
) -> tuple[list[mx.array], dict[str, mx.array]]:
    """Row sums of log-probs per batch and the gradient of `loss` by parameter name, evaluated."""
    parameters = trainable(model)
    names = list(parameters)
    sums: list[mx.array] = []

    def scalar(*values: mx.array) -> list[mx.array]:
        with swapped(model, parameters, names, values):
            if picked:
                return [_through_picked_head(model, batches, loss, head_chunk, sums)]
            sums[:] = [row_sums(_full_head(model, picks), picks.counts) for picks in batches]
            return [loss(sums)]

    gradients = mx.vjp(scalar, list(parameters.values()), [mx.array(1.0)])[1]
    mx.eval(sums, gradients)
    return sums, dict(zip(names, gradients, strict=True))


def _through_picked_head(
    model: nn.Module, batches: Sequence[Picks], loss: Loss, head_chunk: int, sums: list[mx.array]
) -> mx.array:
    """A scalar whose gradient is the loss's: the sum of hidden states times the (constant) gradient they receive."""
    hidden, pulls = [], []
    for picks in batches:
        seen = record(model, picks.inputs)
        hidden.append(pick(seen.hidden, picks.positions))
        logp, pull = _chained_head(model, seen.results, picks, mx.stop_gradient(hidden[-1]), head_chunk)
        sums.append(row_sums(logp, picks.counts))
        pulls.append(pull)
    slopes = mx.grad(loss)([mx.stop_gradient(s) for s in sums])
    total = mx.array(0.0)
    for h, pull, slope, picks in zip(hidden, pulls, slopes, batches, strict=True):
        total = total + (h * mx.stop_gradient(scaled(pull, slope, picks))).sum()
    return total


def _chained_head(
    model: nn.Module, results: Sequence[Any], picks: Picks, hidden: mx.array, head_chunk: int
) -> tuple[mx.array, mx.array]:
    """Log-probs [P] and dl/dh [..., 1, P, D]; each chunk waits for the one before it."""
    if not picks.total:
        return mx.zeros(0), mx.zeros_like(hidden)
    logps: list[mx.array] = []
    pulls: list[mx.array] = []
    for span in chunks(picks.total, head_chunk):
        part = hidden[..., span[0] : span[1], :]
        if logps:
            (part,) = mx.depends([part], [logps[-1], pulls[-1]])
        logp, pull = head_pass(model, results, picks, part, span)
        logps.append(logp)
        pulls.append(pull)
    return mx.concatenate(logps), mx.concatenate(pulls, axis=-2)


def _full_head(model: nn.Module, picks: Picks) -> mx.array:
    """Log-probs [P] out of the logits of every position: for models whose head cannot run alone."""
    if not picks.total:
        return mx.zeros(0)
    logits = model(picks.inputs)
    check_vocabulary(picks, logits.shape[-1])
    flat = logits.reshape(-1, logits.shape[-1])
    return log_probs(mx.take(flat, picks.positions, axis=0), picks.targets)


def score_rows(model: nn.Module, picks: Picks, *, head_chunk: int, picked: bool) -> mx.array:
    """Row sums of log-probs [B], evaluated, with the bits that a gradient has; nothing is kept for a backward."""
    if not picks.total:
        return mx.zeros(len(picks.counts))
    parameters = trainable(model)
    results: list[Any] = []

    def forward(*values: mx.array) -> mx.array:
        with swapped(model, parameters, list(parameters), values):
            if not picked:
                return _full_head(model, picks)
            seen = record(model, picks.inputs)
            results.extend(seen.results)
            return pick(seen.hidden, picks.positions)

    out: mx.array = traced(forward, *parameters.values())
    mx.eval(out)
    logps = [] if picked else [out]
    for span in chunks(picks.total, head_chunk) if picked else ():
        logps.append(head_score(model, results, picks, out[..., span[0] : span[1], :], span))
        mx.eval(logps[-1])
    sums = row_sums(mx.concatenate(logps), picks.counts)
    mx.eval(sums)
    return sums
