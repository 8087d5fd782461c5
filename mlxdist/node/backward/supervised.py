"""The supervised positions of rows, gathered across the rows: the only ones that go through the head.

Shapes: B rows, L positions (position i predicts token i + 1), P supervised positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxdist.node.backward.packing import NOT_PACKED, Packing
from mlxdist.protocol.errors import DataError


@dataclass(frozen=True, slots=True)
class Supervised:
    """A micro-batch with its supervised positions, those of all its rows one after the other."""

    inputs: mx.array  # int32 [B, L], for the layers
    positions: mx.array  # int32 [P], into the flattened B * L
    ids: mx.array  # int32 [P], the input tokens there
    targets: mx.array  # int32 [P], the tokens to predict there
    rows: mx.array  # int32 [P], the row of each
    counts: tuple[int, ...]  # [B], supervised positions per row
    largest: int  # of all token ids, to be compared with the vocabulary
    packing: Packing = NOT_PACKED  # of inputs [1, T]: the pieces that the rows are

    @property
    def total(self) -> int:
        """P, the sum of the counts."""
        return sum(self.counts)


def supervised(inputs: npt.ArrayLike, targets: npt.ArrayLike, mask: npt.ArrayLike) -> Supervised:
    """Gathers the positions where `mask` is not 0, all [B, L]. Raises `DataError` for a negative token id."""
    ids, wanted = np.asarray(inputs, np.int32), np.asarray(targets, np.int32)
    counted = np.asarray(mask) != 0
    if min(ids.min(), wanted.min()) < 0:
        raise DataError("A token id is negative: the rows were not made by the model's tokenizer.")
    positions = np.flatnonzero(counted)
    return Supervised(
        inputs=mx.array(ids),
        positions=mx.array(positions.astype(np.int32)),
        ids=mx.array(ids.reshape(-1)[positions]),
        targets=mx.array(wanted.reshape(-1)[positions]),
        rows=mx.array((positions // ids.shape[1]).astype(np.int32)),
        counts=tuple(int(count) for count in counted.sum(axis=1)),
        largest=int(max(ids.max(), wanted.max())),
    )


def check_vocabulary(batch: Supervised, vocabulary: int) -> None:
    """Raises `DataError` for a token id that the model's output has no row for: mlx would read past the matrix."""
    if batch.largest >= vocabulary:
        raise DataError(
            f"Token id {batch.largest} is outside of the model's vocabulary of {vocabulary}: the tokenizer is not this "
            "model's, or the model was not resized after tokens were added."
        )


def row_sums(log_probs: mx.array, counts: Sequence[int]) -> mx.array:
    """Sums the log-probs [P] of each row: float32 [B]. A row's sum depends on its own positions only."""
    sums, start = [], 0
    for count in counts:
        sums.append(log_probs[start : start + count].sum() if count else mx.array(0.0))
        start += count
    return mx.stack(sums)
