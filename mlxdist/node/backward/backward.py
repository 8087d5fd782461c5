"""The two operations of a worker's model, `score` and the gradient, on the path that the model allows.

Every objective here is a function of each row's sum of log-probs. So a loss is given as that function, and the same
code serves SFT, DPO (two rows for each pair) and KTO (its reference point is a constant in the loss).

Shapes: B rows, L positions.
"""

from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy.typing as npt

from mlxdist.node.backward.chunked_layers import chunked_layers
from mlxdist.node.backward.dropout import dropout_off
from mlxdist.node.backward.events import Events, Loss
from mlxdist.node.backward.full_graph import forward_row_sums, full_graph_backward
from mlxdist.node.backward.grad_checkpoint import checkpointed
from mlxdist.node.backward.packing import packed
from mlxdist.node.backward.segments import segmented_backward
from mlxdist.node.backward.supervised import Supervised, supervised


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one width, numpy or mlx arrays: `targets[b, i]` follows `inputs[b, i]` and counts where the mask is 1."""

    inputs: npt.ArrayLike  # int32 [B, L]
    targets: npt.ArrayLike  # int32 [B, L]
    mask: npt.ArrayLike  # [B, L], 0 or 1


@dataclass(frozen=True, slots=True)
class GradientPath:
    """The way in which a model's gradient is computed; decided once, at the start, by `choose_path`."""

    segment_size: int = 0  # layers per segment; 0 = the whole graph
    supervised_head: bool = True  # the head runs on supervised positions only
    checkpoint: bool = False  # mlx-lm's grad_checkpoint around every layer
    chunked: bool = False  # gated-delta layers run in chunks of tokens
    reason: str = ""  # one sentence for the user when it is not the path that was asked for


WHOLE = GradientPath()
Batch = MicroBatch | Supervised


def score(model: nn.Module, batch: Batch, *, head_chunk: int, path: GradientPath = WHOLE) -> mx.array:
    """Returns each row's sum of log-probs over its targets, float32 [B], with dropout off; no graph is kept."""
    rows = _supervised(batch)
    with dropout_off(model), chunked_layers(path.chunked), packed(model, rows.packing):
        return forward_row_sums(model, rows, head_chunk=head_chunk, supervised_head=path.supervised_head)


def backward(
    model: nn.Module,
    batches: Sequence[Batch],
    loss: Loss,
    *,
    head_chunk: int,
    path: GradientPath = WHOLE,
    dropout_key: int | None = None,
) -> Events:
    """Builds the graph, and returns the events of its computation: nothing is computed before the first is taken.

    On the whole graph: `Computing`, the row sums of all micro-batches, the gradient of `loss(row sums)` in one part. In
    segments: the row sums, then a part after each segment, top layer first, with `Computing` in the last one. Nothing
    else runs between two events, and closing the generator ends the work.

    Args:
        model: left in training mode.
        batches: a leaf packed into one, or several; a packed one stands alone.
        loss: from the list of row sums to the scalar sum (never a mean) of the losses.
        head_chunk: positions of the head computed at a time.
        path: from `choose_path`.
        dropout_key: seeds this leaf's dropout; None leaves the random state alone.
    """
    if not model.training:
        model.train()  # visits every module
    if dropout_key is not None:
        mx.random.seed(dropout_key)
    rows = [_supervised(batch) for batch in batches]
    with chunked_layers(path.chunked):
        if path.segment_size:
            events = segmented_backward(model, rows, loss, segment_size=path.segment_size, head_chunk=head_chunk)
            return _in_chunks(events, path.chunked)
        return _whole_graph(model, rows, loss, head_chunk, path)


def _in_chunks(events: Events, chunked: bool) -> Events:
    """Yields events that build more graphs, each with the chunked layers.

    Not while an event is used: that lasts as long as the caller likes.
    """
    with closing(events):
        while True:
            with chunked_layers(chunked):
                event = next(events, None)
            if event is None:
                return
            yield event
            del event  # its arrays would wait for the next one


def _whole_graph(
    model: nn.Module, rows: Sequence[Supervised], loss: Loss, head_chunk: int, path: GradientPath
) -> Events:
    assert len(rows) == 1 or not any(batch.packing.pieces for batch in rows)
    # Outermost, so that a layer that is computed again by its checkpoint is packed as well.
    with packed(model, rows[0].packing), checkpointed(model) if path.checkpoint else nullcontext():
        return full_graph_backward(model, rows, loss, head_chunk=head_chunk, supervised_head=path.supervised_head)


def _supervised(batch: Batch) -> Supervised:
    return batch if isinstance(batch, Supervised) else supervised(batch.inputs, batch.targets, batch.mask)
