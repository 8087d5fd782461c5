"""Rows and leaves: the units that a worker computes on, the same on every node.

A leaf is a pure function of the global batch, never of the nodes. Shapes: B rows of a leaf, T tokens of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlxdist.protocol.errors import WireError
from mlxdist.protocol.messages import LeafRows

Ids = npt.NDArray[np.int32]
Targets = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Row:
    """One token sequence. `targets[i] == 1` means that token i is predicted and counted; `targets[0]` is 0."""

    row_id: int  # the row's (pair's) place in its file, from 0
    ids: Ids  # [T]
    targets: Targets  # [T], 0 or 1


@dataclass(frozen=True, slots=True)
class Leaf:
    """A micro-batch: the rows that one forward and backward hold. Rows of pairs alternate chosen and rejected."""

    index: int  # place among the step's leaves, from 0
    rows: tuple[Row, ...]
    widths: tuple[int, ...]  # tokens that rows are padded to: one number, or one for chosen and one for rejected

    @property
    def items(self) -> int:
        """The number B of its rows, or of its pairs."""
        return len(self.rows) // len(self.widths)


def leaf_width(lengths: Sequence[int], max_length: int) -> int:
    """Returns the width of a leaf in tokens: one row is not padded, several go to 1 + 32k, capped at `max_length`."""
    longest = max(lengths)
    if len(lengths) == 1:
        return longest
    return max(longest, min(1 + 32 * -(-(longest - 1) // 32), max_length))


def pack_leaf(leaf: Leaf) -> bytes:
    """Returns the payload of a LeafRows message: all ids as int32, then all targets as one byte each."""
    return b"".join([row.ids.tobytes() for row in leaf.rows] + [row.targets.tobytes() for row in leaf.rows])


def unpack_leaf(message: LeafRows, payload: memoryview) -> Leaf:
    """Returns the leaf of a LeafRows message. Raises WireError when payload, lengths and widths do not match."""
    tokens, widths = sum(message.lengths), message.widths
    if payload.nbytes != 5 * tokens or len(message.row_ids) != len(message.lengths):
        raise WireError(f"leaf {message.leaf}: {payload.nbytes} bytes for {tokens} tokens")
    if not message.lengths or not widths or len(message.lengths) % len(widths):
        raise WireError(f"leaf {message.leaf}: {len(message.lengths)} rows in {len(widths)} widths")
    if any(not 1 <= length <= widths[i % len(widths)] for i, length in enumerate(message.lengths)):
        raise WireError(f"leaf {message.leaf}: rows of {message.lengths} tokens in widths {widths}")
    ids = np.frombuffer(payload, np.int32, tokens)
    targets = np.frombuffer(payload, np.uint8, tokens, offset=4 * tokens)
    rows, start = [], 0
    for row_id, length in zip(message.row_ids, message.lengths, strict=True):
        rows.append(Row(row_id, ids[start : start + length], targets[start : start + length]))
        start += length
    return Leaf(message.leaf, tuple(rows), message.widths)
