"""The layout of rows in a pass: packed into one row with what they share computed once, or each row alone.

A row's last token is only predicted, so it is not among the inputs. Shapes: T tokens of the inputs, P supervised
positions.
"""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlxdist.node.backward.packing import NOT_PACKED, Packing, Piece
from mlxdist.node.backward.supervised import Supervised
from mlxdist.protocol.errors import DataError
from mlxdist.protocol.leaves import Row, shared_tokens

Places = npt.NDArray[np.int64]


def pack(items: Sequence[Sequence[Row]], mixers: tuple[type[nn.Module], ...] = ()) -> Supervised:
    """Returns the rows of all items as one packed row [1, T], item by item.

    What a row has in common with the first row of its item is computed with that row. A position there may be picked
    by several rows. Raises `DataError` for a negative token id.
    """
    pieces: list[Piece] = []
    places: list[Places] = []  # of each row, where its inputs are
    end = 0
    for item in items:
        first = end
        for row, shared in zip(item, shared_tokens(item), strict=True):
            start, end = end, end + len(row.ids) - 1 - shared
            if end > start:
                pieces.append(Piece(start, end, (first, first + shared) if shared else (0, 0)))
            places.append(np.concatenate([np.arange(first, first + shared), np.arange(start, end)]))
    return _picked([row for item in items for row in item], places, Packing(tuple(pieces), mixers))


def alone(row: Row) -> Supervised:
    """Returns one row as it is, [1, T]. Raises `DataError` for a negative token id."""
    return _picked([row], [np.arange(len(row.ids) - 1)], NOT_PACKED)


def _picked(rows: Sequence[Row], places: Sequence[Places], packing: Packing) -> Supervised:
    """Returns rows whose inputs stand at `places` of the packed row, with the positions before their targets."""
    if min(int(row.ids.min()) for row in rows) < 0:
        raise DataError("A token id is negative: the rows were not made by the model's tokenizer.")
    inputs = np.zeros(1 + max(int(place[-1]) for place in places if len(place)), np.int32)
    for row, place in zip(rows, places, strict=True):
        inputs[place] = row.ids[:-1]
    counts = [int(row.targets[1:].sum()) for row in rows]
    positions = np.concatenate([place[row.targets[1:] != 0] for row, place in zip(rows, places, strict=True)])
    targets = np.concatenate([row.ids[1:][row.targets[1:] != 0] for row in rows])
    return Supervised(
        inputs=mx.array(inputs[None]),
        positions=mx.array(positions.astype(np.int32)),
        ids=mx.array(inputs[positions]),
        targets=mx.array(targets.astype(np.int32)),
        rows=mx.array(np.repeat(np.arange(len(rows), dtype=np.int32), counts)),
        counts=tuple(counts),
        largest=max(int(row.ids.max()) for row in rows),
        packing=packing,
    )
