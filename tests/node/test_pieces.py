"""A packed row is cut into its pieces by work that grows as the row does, whatever their number."""

import re
from collections import Counter
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxdist.node.backward.packing import FAN, Piece, by_piece


def pieces_of(lengths: list[int]) -> tuple[Piece, ...]:
    """Pieces one after the other; every third one sees the beginning of the one before."""
    pieces, start = list[Piece](), 0
    for place, length in enumerate(lengths):
        before = pieces[-1] if place % 3 == 2 else None
        prefix = (before.start, before.start + (before.end - before.start + 1) // 2) if before else (0, 0)
        pieces.append(Piece(start, start + length, prefix))
        start += length
    return tuple(pieces)


def gradient(pieces: tuple[Piece, ...], x: mx.array, *, slices: bool) -> mx.array:
    """The gradient of a sum of squares over all that the pieces see, each piece with another factor."""

    def total(x: mx.array) -> list[mx.array]:
        parts = [piece.seen(x, 1) for piece in pieces] if slices else by_piece(x, pieces)
        return [sum((place + 1) * (part * part).sum() for place, part in enumerate(parts))]  # type: ignore[list-item]

    return mx.vjp(total, [x], [mx.array(1.0)])[1][0]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=70))
def test_pieces_and_their_gradient_are_those_of_slices(lengths: list[int]) -> None:
    pieces = pieces_of(lengths)
    x = mx.random.normal((1, pieces[-1].end, 3), key=mx.random.key(len(lengths)))
    for piece, part in zip(pieces, by_piece(x, pieces), strict=True):
        assert mx.array_equal(part, piece.seen(x, 1))
    expected, got = (gradient(pieces, x, slices=each) for each in (True, False))
    assert mx.allclose(got, expected, rtol=1e-6)


def test_hidden_states_are_no_mask_where_the_row_has_as_many_tokens_as_features() -> None:
    pieces = pieces_of([3, 3])
    hidden, mask = mx.random.normal((1, 6, 6)), mx.ones((6, 6), mx.bool_)
    assert [part.shape for part in by_piece(hidden, pieces)] == [(1, 3, 6), (1, 3, 6)]
    assert [part.shape for part in by_piece(mask, pieces)] == [(3, 3), (3, 3)]


@pytest.mark.parametrize("count", [30, 60, 120])
def test_no_gradient_of_a_piece_is_as_long_as_the_row(tmp_path: Path, count: int) -> None:
    """A slice's gradient puts it into zeros of the row's length; a split's joins what all pieces have."""
    pieces = pieces_of([4] * count)
    x = mx.random.normal((1, 4 * count, 3), key=mx.random.key(0))  # the state itself may hold splits
    graph = tmp_path / "graph.dot"
    mx.export_to_dot(str(graph), gradient(pieces, x, slices=False))
    operations = Counter(re.findall(r'label ?="(\w+)"', graph.read_text(encoding="utf-8")))
    prefixes = count // 3
    assert operations["SliceUpdate"] == prefixes  # each in a piece, not in the row
    assert 0 < operations["Split"] <= count / (FAN - 1) * 2
