"""The choice of the path for a model's gradient: the one asked for if it agrees with plain autograd on a tiny batch.

No list of architectures is kept. Any model that mlx-lm loads is tried. One that works differently is found here,
before training time is spent, and takes the nearest path that agrees.
"""

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxdist.node.backward.backward import GradientPath, MicroBatch, backward
from mlxdist.node.backward.chunked_layers import disagreement, has_gated_delta, unknown_form
from mlxdist.node.backward.comparison import SEED, TOLERANCE, coarsest, distance, in_short, moved
from mlxdist.node.backward.events import gathered
from mlxdist.protocol.errors import NodeError


def choose_path(
    model: nn.Module, *, segment_size: int = 0, grad_checkpoint: bool = False, chunked: bool = False
) -> GradientPath:
    """Returns the path nearest to the one asked for whose gradient equals plain autograd's on a tiny batch.

    Args:
        model: with its LoRA layers; its parameters are as before when this returns.
        segment_size: layers per segment; 0 for the whole graph.
        grad_checkpoint: mlx-lm's checkpointing instead of segments.
        chunked: gated-delta layers run in chunks of tokens, where the model has any.

    Raises:
        NodeError: the model cannot be trained with mlx at all.
    """
    try:
        expected = _tiny_gradient(model, GradientPath(supervised_head=False))
    except Exception as error:
        raise NodeError(f"mlx cannot differentiate this model ({type(model).__module__}): {in_short(error)}") from error
    slow = _reason_against_chunks(model, expected) if chunked and has_gated_delta(model) else ""
    chunked = chunked and has_gated_delta(model) and not slow
    path = _nearest_path(model, expected, segment_size, grad_checkpoint, chunked)
    return replace(path, reason=" ".join(filter(None, (slow, path.reason))))


def _reason_against_chunks(model: nn.Module, expected: dict[str, mx.array]) -> str:
    """Returns a sentence on gated-delta layers that must run token by token; "" where chunks give the same."""
    try:
        why = unknown_form() or disagreement(TOLERANCE[mx.float32])
        if not why:
            difference = distance(expected, _tiny_gradient(model, GradientPath(supervised_head=False, chunked=True)))
            if difference > TOLERANCE[coarsest(model)] and _finite(expected):
                why = f"in chunks their gradient differs by {difference:.1e}"
    except Exception as error:  # an unknown function or device may raise anything
        why = in_short(error)
    return f"The gated-delta layers of this model are trained token by token, which is slow ({why})." if why else ""


def _nearest_path(
    model: nn.Module, expected: dict[str, mx.array], segment_size: int, grad_checkpoint: bool, chunked: bool
) -> GradientPath:
    candidates = [replace(path, chunked=chunked) for path in _candidates(segment_size, grad_checkpoint)]
    asked, why = candidates[0], ""
    for path in candidates:
        try:
            difference = distance(expected, _tiny_gradient(model, path))
        except Exception as error:  # an unknown model may raise anything when it is called in another way
            why = why or in_short(error)
            continue
        if difference <= TOLERANCE[coarsest(model)] or not _finite(expected):
            return replace(path, reason=_reason(asked, path, why) if why else "")
        why = why or f"its gradient differs from plain autograd by {difference:.1e}"
    return replace(candidates[-1], reason=_reason(asked, candidates[-1], why))


def _candidates(segment_size: int, grad_checkpoint: bool) -> Iterator[GradientPath]:
    """Yields the path that was asked for, then those that take more and more memory."""
    if segment_size:
        yield GradientPath(segment_size=segment_size)
    if segment_size or grad_checkpoint:
        yield GradientPath(checkpoint=True)
        yield GradientPath(checkpoint=True, supervised_head=False)
    yield GradientPath()
    yield GradientPath(supervised_head=False)


def _reason(asked: GradientPath, taken: GradientPath, why: str) -> str:
    cannot = "be trained in segments" if asked.segment_size else "be trained with grad_checkpoint"
    instead = "mlx-lm's grad_checkpoint is used" if taken.checkpoint else "all activations are kept"
    head = "" if taken.supervised_head else "its head runs on all positions"
    if not asked.segment_size and taken.checkpoint == asked.checkpoint:
        return f"This model's head cannot run on supervised positions alone ({why}): {head}."
    return f"This model cannot {cannot} ({why}): {' and '.join(filter(None, (instead, head)))}."


def _tiny_gradient(model: nn.Module, path: GradientPath) -> dict[str, mx.array]:
    """Returns row sums and gradient on two rows of different lengths, at parameters that are nowhere zero."""
    batch = _tiny_batch(model(mx.array([[1, 2]])).shape[-1])
    with moved(model):
        events = backward(model, [batch], _tiny_loss, head_chunk=4, path=path, dropout_key=SEED)
        sums, gradients = gathered(events)
    return {"row sums": sums[0], **gradients}


def _tiny_loss(sums: list[mx.array]) -> mx.array:
    return (sums[0] * sums[0]).sum() / 100 - sums[0].sum()


def _tiny_batch(vocabulary: int) -> MicroBatch:
    draw = np.random.default_rng(0)
    ids = draw.integers(1, min(vocabulary, 1000), (2, 18)).astype(np.int32)
    mask = np.zeros((2, 17), np.float32)
    mask[0, 5:17] = 1
    mask[1, 3:7] = 1  # the rest of this row is padding
    ids[1, 8:] = 0
    return MicroBatch(ids[:, :-1], ids[:, 1:], mask)


def _finite(gradient: dict[str, mx.array]) -> bool:
    """Returns False when the check cannot decide; training itself checks every leaf for NaN and Inf."""
    return all(mx.isfinite(value).all().item() for value in gradient.values())
