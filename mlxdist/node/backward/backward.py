"""The two verbs of a worker's model: `score` and `gradient`, on whichever path the model allows.

Every objective here is a function of each row's sum of log-probs, so a loss is given as that function and the same code
serves SFT, DPO (two micro-batches, chosen and rejected) and KTO (its reference point is a constant in the loss).

Shapes: B rows, L positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy.typing as npt

from mlxdist.node.backward.dropout import dropout_off
from mlxdist.node.backward.full_graph import Loss, score_rows, whole_gradient
from mlxdist.node.backward.grad_checkpoint import checkpointed
from mlxdist.node.backward.segments import OnBegin, OnFinal, segmented_gradient
from mlxdist.node.backward.supervised import Picks, picks_of


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one width, numpy or mlx arrays: `targets[b, i]` follows `inputs[b, i]` and counts where the mask is 1."""

    inputs: npt.ArrayLike  # int32 [B, L]
    targets: npt.ArrayLike  # int32 [B, L]
    mask: npt.ArrayLike  # [B, L], 0 or 1


@dataclass(frozen=True, slots=True)
class Path:
    """How a model's gradient is computed; decided once, at the start, by `choose_path`."""

    segment_size: int = 0  # layers per segment; 0 = the whole graph
    picked: bool = True  # the head runs on supervised positions only
    checkpoint: bool = False  # mlx-lm's grad_checkpoint around every layer
    reason: str = ""  # one sentence for the user when it is not what was asked for


WHOLE = Path()


def score(model: nn.Module, batch: MicroBatch, *, head_chunk: int, path: Path = WHOLE) -> mx.array:
    """Each row's sum of log-probs over its targets, float32 [B], dropout off; no graph is kept."""
    with dropout_off(model):
        return score_rows(model, _picks(batch), head_chunk=head_chunk, picked=path.picked)


def gradient(
    model: nn.Module,
    batches: Sequence[MicroBatch],
    loss: Loss,
    *,
    head_chunk: int,
    path: Path = WHOLE,
    dropout_key: int | None = None,
    on_begin: OnBegin | None = None,
    on_final: OnFinal | None = None,
) -> tuple[list[mx.array], dict[str, mx.array]]:
    """Each batch's row sums of log-probs [B] and the gradient of `loss(row sums)` by trainable parameter name.

    Args:
        model: left in training mode.
        batches: one for SFT and KTO; chosen and rejected for DPO.
        loss: from the list of row sums to the scalar sum (never a mean) of the losses.
        head_chunk: positions of the head computed at a time.
        path: from `choose_path`.
        dropout_key: seeds this leaf's dropout; None leaves the random state alone.
        on_begin: called with the row sums before the first segment's backward; on the whole graph never.
        on_final: called with names and gradients as they become final, top layer first; on the whole graph once, at
            the end.
    """
    model.train()
    if dropout_key is not None:
        mx.random.seed(dropout_key)
    picks = [_picks(batch) for batch in batches]
    if path.segment_size:
        return segmented_gradient(
            model,
            picks,
            loss,
            segment_size=path.segment_size,
            head_chunk=head_chunk,
            on_begin=on_begin,
            on_final=on_final,
        )
    with checkpointed(model, on=path.checkpoint):
        sums, gradients = whole_gradient(model, picks, loss, head_chunk=head_chunk, picked=path.picked)
    if on_final is not None:
        on_final(list(gradients), gradients)
    return sums, gradients


def _picks(batch: MicroBatch) -> Picks:
    return picks_of(batch.inputs, batch.targets, batch.mask)
