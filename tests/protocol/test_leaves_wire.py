"""Leaves on the wire: what was packed is unpacked, and a payload that does not fit its header is refused."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import WireError
from mlxdist.protocol.leaves import Leaf, Row, item_tokens, pack_leaf, shared_tokens, unpack_leaf
from mlxdist.protocol.wire import decode, encode


def message_of(leaf: Leaf) -> m.LeafRows:
    return m.LeafRows(
        session=m.SessionId("run", 1, "1"),
        step=1,
        attempt=1,
        leaf=leaf.index,
        branches=leaf.branches,
        row_ids=tuple(row.row_id for row in leaf.rows),
        lengths=tuple(len(row.ids) for row in leaf.rows),
    )


@st.composite
def leaves(draw: Callable[..., Any]) -> Leaf:
    """Leaves of rows (sft, kto) or of pairs (dpo: chosen and rejected in turn)."""
    branches = draw(st.integers(1, 2))
    lengths = draw(
        st.lists(st.integers(1, 40), min_size=branches, max_size=6).map(
            lambda rows: rows[: len(rows) // branches * branches]
        )
    )
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = tuple(
        Row(
            draw(st.integers(0, 2**62)),
            random.integers(0, 2**31, length, dtype=np.int32),
            random.integers(0, 2, length, dtype=np.uint8),
        )
        for length in lengths
    )
    return Leaf(draw(st.integers(0, 1000)), rows, branches)


def plain(leaf: Leaf) -> Any:
    rows = [(row.row_id, row.ids.dtype, row.ids.tolist(), row.targets.dtype, row.targets.tolist()) for row in leaf.rows]
    return leaf.index, leaf.branches, rows


def some_leaf() -> Leaf:
    rows = [
        Row(7, np.array([5, 6, 7], np.int32), np.array([0, 0, 1], np.uint8)),
        Row(9, np.array([258, 2**31 - 1], np.int32), np.array([0, 1], np.uint8)),
    ]
    return Leaf(3, tuple(rows))


@given(leaves())
def test_a_leaf_arrives_as_it_was_packed(leaf: Leaf) -> None:
    message, payload = decode([bytes(frame) for frame in encode(message_of(leaf), pack_leaf(leaf))])
    assert isinstance(message, m.LeafRows)
    assert plain(unpack_leaf(message, payload)) == plain(leaf)


def test_ids_stand_before_targets_little_endian_and_rows_in_order() -> None:
    assert pack_leaf(some_leaf()) == (
        bytes([5, 0, 0, 0, 6, 0, 0, 0, 7, 0, 0, 0]) + bytes([2, 1, 0, 0, 255, 255, 255, 127]) + bytes([0, 0, 1, 0, 1])
    )


def test_rows_that_are_views_of_a_longer_array_are_packed_alone() -> None:
    ids = np.arange(20, dtype=np.int32)
    row = Row(1, ids[3:13:2], np.ones(10, np.uint8)[::2])
    leaf = Leaf(0, (row,))
    assert plain(unpack_leaf(message_of(leaf), memoryview(pack_leaf(leaf)))) == plain(leaf)


def test_a_payload_at_an_odd_address_is_read_too() -> None:
    leaf = some_leaf()
    shifted = memoryview(b"x" + pack_leaf(leaf))[1:]
    assert plain(unpack_leaf(message_of(leaf), shifted)) == plain(leaf)


def test_every_truncation_and_every_tail_is_refused() -> None:
    leaf = some_leaf()
    payload = pack_leaf(leaf)
    for wrong in [*(payload[:size] for size in range(len(payload))), payload + b"\0", payload * 2]:
        with pytest.raises(WireError, match=f"leaf 3: {len(wrong)} bytes for 5 tokens"):
            unpack_leaf(message_of(leaf), memoryview(wrong))


@pytest.mark.parametrize(
    "change",
    [
        {"row_ids": ()},
        {"row_ids": (7,)},
        {"row_ids": (7, 8, 9)},
        {"lengths": ()},
        {"lengths": (5,)},
        {"lengths": (2, 2)},
        {"lengths": (6, -1)},
        {"lengths": (5, 0)},
        {"lengths": (2**62, 5 - 2**62)},
        {"lengths": (), "row_ids": ()},
        {"branches": 0},
        {"branches": -1},
        {"branches": 3},
    ],
    ids=str,
)
def test_rows_lengths_and_branches_that_do_not_belong_together_are_refused(change: dict[str, Any]) -> None:
    leaf = some_leaf()
    message = msgspec.structs.replace(message_of(leaf), **change)
    with pytest.raises(WireError, match="leaf 3"):
        unpack_leaf(message, memoryview(pack_leaf(leaf)))


def test_a_leaf_without_rows_is_refused() -> None:
    message = msgspec.structs.replace(message_of(some_leaf()), lengths=(), row_ids=())
    with pytest.raises(WireError, match="leaf 3"):
        unpack_leaf(message, memoryview(b""))


@given(st.binary(max_size=60), st.lists(st.integers(-3, 9), max_size=5), st.integers(-3, 9))
def test_noise_is_a_leaf_or_a_wire_error(payload: bytes, lengths: list[int], branches: int) -> None:
    message = msgspec.structs.replace(
        message_of(some_leaf()), lengths=tuple(lengths), row_ids=tuple(range(len(lengths))), branches=branches
    )
    try:
        leaf = unpack_leaf(message, memoryview(payload))
    except WireError:
        return
    assert [len(row.ids) for row in leaf.rows] == [len(row.targets) for row in leaf.rows] == lengths


def row_of(*ids: int) -> Row:
    return Row(0, np.array(ids, np.int32), np.ones(len(ids), np.uint8))


@pytest.mark.parametrize(
    ("first", "other", "shared"),
    [
        ((1, 2, 3, 4), (1, 2, 5, 6, 7), 2),
        ((1, 2, 3), (4, 5), 0),
        ((1, 2, 3), (1, 2, 3), 2),  # the last token is only predicted
        ((1, 2, 3), (1, 2, 3, 4, 5), 2),
        ((1,), (1, 2), 0),
    ],
)
def test_rows_of_an_item_share_what_they_begin_with(
    first: tuple[int, ...], other: tuple[int, ...], shared: int
) -> None:
    item = (row_of(*first), row_of(*other))
    assert shared_tokens(item) == [0, shared]
    assert item_tokens(item) == len(first) + len(other) - shared
    leaf = Leaf(0, item * 2, 2)
    assert (leaf.items, leaf.shared, leaf.tokens) == (2, [0, shared] * 2, 2 * item_tokens(item))
    assert Leaf(0, item).tokens == len(first) + len(other)
