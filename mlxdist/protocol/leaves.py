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
    """The rows that one forward and backward hold, packed into one. Rows of pairs alternate chosen and rejected."""

    index: int  # place among the step's leaves, from 0
    rows: tuple[Row, ...]
    branches: int = 1  # rows of one item: 1, or 2 and more that share what they begin with

    @property
    def items(self) -> int:
        """The number B of its rows, or of its pairs."""
        return len(self.rows) // self.branches

    @property
    def shared(self) -> list[int]:
        """Of each row, the tokens that it shares with the first row of its item, whose own is 0."""
        return [
            tokens
            for start in range(0, len(self.rows), self.branches)
            for tokens in shared_tokens(self.rows[start : start + self.branches])
        ]

    @property
    def tokens(self) -> int:
        """The tokens that a pass over it computes: those that an item's rows share are counted once."""
        return sum(len(row.ids) - shared for row, shared in zip(self.rows, self.shared, strict=True))


def shared_tokens(item: Sequence[Row]) -> list[int]:
    """Returns the leading tokens that each row of an item has in common with the first one, for which it is 0.

    A row's last token is only predicted, never read, so it is not among them.
    """
    first = item[0].ids[:-1]
    return [0, *(_common(first, row.ids[:-1]) for row in item[1:])]


def item_tokens(item: Sequence[Row]) -> int:
    """Returns the tokens that an item costs: a row's own, or P + C + R of a pair with a prompt of P."""
    return sum(len(row.ids) - shared for row, shared in zip(item, shared_tokens(item), strict=True))


def _common(left: Ids, right: Ids) -> int:
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


def pack_leaf(leaf: Leaf) -> bytes:
    """Returns the payload of a LeafRows message: all ids as int32, then all targets as one byte each."""
    return b"".join([row.ids.tobytes() for row in leaf.rows] + [row.targets.tobytes() for row in leaf.rows])


def unpack_leaf(message: LeafRows, payload: memoryview) -> Leaf:
    """Returns the leaf of a LeafRows message. Raises WireError when payload, lengths and branches do not match."""
    tokens, branches = sum(message.lengths), message.branches
    if payload.nbytes != 5 * tokens or len(message.row_ids) != len(message.lengths):
        raise WireError(f"leaf {message.leaf}: {payload.nbytes} bytes for {tokens} tokens")
    if not message.lengths or branches < 1 or len(message.lengths) % branches:
        raise WireError(f"leaf {message.leaf}: {len(message.lengths)} rows, {branches} for each item")
    if min(message.lengths) < 1:
        raise WireError(f"leaf {message.leaf}: rows of {message.lengths} tokens")
    ids = np.frombuffer(payload, np.int32, tokens)
    targets = np.frombuffer(payload, np.uint8, tokens, offset=4 * tokens)
    rows, start = [], 0
    for row_id, length in zip(message.row_ids, message.lengths, strict=True):
        rows.append(Row(row_id, ids[start : start + length], targets[start : start + length]))
        start += length
    return Leaf(message.leaf, tuple(rows), branches)
