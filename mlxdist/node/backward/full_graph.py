"""The whole-graph path: every layer's activations are kept until its backward. The fastest path where they fit.

The head is not part of that graph. One pass over it gives each position's log-prob l and dl/dh, and the layers receive
the cotangent dF/dh = dF/dl * dl/dh. Chunks are chained so that only one chunk of logits is held at a time.

Shapes: B rows, P supervised positions, D hidden size.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxdist.node.backward.events import Computing, Events, FinalPart, Loss, RowSums, computing
from mlxdist.node.backward.head import (
    at_positions,
    chunks,
    head_backward,
    head_log_probs,
    hidden_cotangent,
    log_probs,
    traced,
)
from mlxdist.node.backward.parameters import swapped, trainable
from mlxdist.node.backward.record import record_forward
from mlxdist.node.backward.supervised import Supervised, check_vocabulary, row_sums


def full_graph_backward(
    model: nn.Module, batches: Sequence[Supervised], loss: Loss, *, head_chunk: int, supervised_head: bool
) -> Events:
    """Builds the graph of the row sums and of `loss`'s gradient; the events compute it."""
    return _computed(*full_graph(model, batches, loss, head_chunk=head_chunk, supervised_head=supervised_head))


def _computed(sums: list[mx.array], gradients: dict[str, mx.array]) -> Events:
    with computing(sums, gradients):
        yield Computing()
    yield RowSums(sums)
    yield FinalPart(gradients)


def full_graph(
    model: nn.Module, batches: Sequence[Supervised], loss: Loss, *, head_chunk: int, supervised_head: bool
) -> tuple[list[mx.array], dict[str, mx.array]]:
    """Returns each batch's row sums of log-probs [B] and the gradient of `loss` by parameter name, not evaluated."""
    parameters = trainable(model)
    names = list(parameters)
    sums: list[mx.array] = []

    def scalar(*values: mx.array) -> list[mx.array]:
        with swapped(model, parameters, names, values):
            if supervised_head:
                return [_through_supervised_head(model, batches, loss, head_chunk, sums)]
            sums[:] = [row_sums(_full_head(model, batch), batch.counts) for batch in batches]
            return [loss(sums)]

    gradients = mx.vjp(scalar, list(parameters.values()), [mx.array(1.0)])[1]
    return sums, dict(zip(names, gradients, strict=True))


def _through_supervised_head(
    model: nn.Module, batches: Sequence[Supervised], loss: Loss, head_chunk: int, sums: list[mx.array]
) -> mx.array:
    """Returns a scalar with the loss's gradient: the sum of hidden states times the (constant) cotangent of each."""
    hidden, cotangents = [], []
    for batch in batches:
        forward = record_forward(model, batch.inputs)
        hidden.append(at_positions(forward.hidden, batch.positions))
        logp, dl_dh = _chained_head(model, forward.results, batch, mx.stop_gradient(hidden[-1]), head_chunk)
        sums.append(row_sums(logp, batch.counts))
        cotangents.append(dl_dh)
    row_cotangents = mx.grad(loss)([mx.stop_gradient(s) for s in sums])
    total = mx.array(0.0)
    for h, dl_dh, rows, batch in zip(hidden, cotangents, row_cotangents, batches, strict=True):
        total = total + (h * mx.stop_gradient(hidden_cotangent(dl_dh, rows, batch))).sum()
    return total


def _chained_head(
    model: nn.Module, results: Sequence[Any], batch: Supervised, hidden: mx.array, head_chunk: int
) -> tuple[mx.array, mx.array]:
    """Returns log-probs [P] and dl/dh [..., 1, P, D]; each chunk waits for the one before it."""
    if not batch.total:
        return mx.zeros(0), mx.zeros_like(hidden)
    logps: list[mx.array] = []
    cotangents: list[mx.array] = []
    for chunk in chunks(batch.total, head_chunk):
        part = hidden[..., chunk[0] : chunk[1], :]
        if logps:
            (part,) = mx.depends([part], [logps[-1], cotangents[-1]])
        logp, dl_dh = head_backward(model, results, batch, part, chunk)
        logps.append(logp)
        cotangents.append(dl_dh)
    return mx.concatenate(logps), mx.concatenate(cotangents, axis=-2)


def _full_head(model: nn.Module, batch: Supervised) -> mx.array:
    """Returns log-probs [P] out of the logits of every position: for models whose head cannot run alone."""
    if not batch.total:
        return mx.zeros(0)
    logits = model(batch.inputs)
    check_vocabulary(batch, logits.shape[-1])
    flat = logits.reshape(-1, logits.shape[-1])
    return log_probs(mx.take(flat, batch.positions, axis=0), batch.targets)


def forward_row_sums(model: nn.Module, batch: Supervised, *, head_chunk: int, supervised_head: bool) -> mx.array:
    """Returns row sums of log-probs [B], evaluated, with the bits that a gradient's have; no graph is kept."""
    if not batch.total:
        return mx.zeros(len(batch.counts))
    parameters = trainable(model)
    results: list[Any] = []

    def forward(*values: mx.array) -> mx.array:
        with swapped(model, parameters, list(parameters), values):
            if not supervised_head:
                return _full_head(model, batch)
            recorded = record_forward(model, batch.inputs)
            results.extend(recorded.results)
            return at_positions(recorded.hidden, batch.positions)

    out: mx.array = traced(forward, *parameters.values())
    mx.eval(out)
    logps = [] if supervised_head else [out]
    for chunk in chunks(batch.total, head_chunk) if supervised_head else ():
        logps.append(head_log_probs(model, results, batch, out[..., chunk[0] : chunk[1], :], chunk))
        mx.eval(logps[-1])
    sums = row_sums(mx.concatenate(logps), batch.counts)
    mx.eval(sums)
    return sums
