"""Vectors on the wire: the same bytes arrive whatever the order of blocks and credits, and damage is refused."""

import hashlib
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxdist.protocol.errors import WireError
from mlxdist.protocol.vectors import (
    BLOCK_BYTES,
    BLOCK_ELEMENTS,
    WINDOW,
    IncomingVector,
    OutgoingVector,
    Vector,
    VectorHash,
    block_count,
    digest,
)

LENGTHS = [
    0,
    1,
    BLOCK_ELEMENTS - 1,
    BLOCK_ELEMENTS,
    BLOCK_ELEMENTS + 1,
    BLOCK_ELEMENTS * 7 // 2,
    (WINDOW + 2) * BLOCK_ELEMENTS + 5,
]
EVERY_BIT = np.random.default_rng(4).integers(0, 2**32, max(LENGTHS), dtype=np.uint32).view(np.float32)


def vector_of(elements: int) -> Vector:
    """Random bit patterns: NaN with payloads, infinities, subnormals and negative zeros among them."""
    return EVERY_BIT[:elements]


def receiver_of(vector: Vector) -> IncomingVector:
    return IncomingVector(1, np.full(len(vector), np.float32(7)))


def transfer(vector: Vector) -> IncomingVector:
    """Everything but the END, without any delay."""
    sender, receiver = OutgoingVector(1, vector), receiver_of(vector)
    while not sender.all_sent:
        sender.credit(receiver.upto)
        for index, block in sender.blocks():
            receiver.block(index, block)
    return receiver


def test_a_block_is_one_mebibyte() -> None:
    assert BLOCK_BYTES == 4 * BLOCK_ELEMENTS == 2**20


@pytest.mark.parametrize("elements", LENGTHS)
def test_a_vector_has_as_many_blocks_as_it_needs(elements: int) -> None:
    assert block_count(elements) == len(range(0, elements, BLOCK_ELEMENTS))


@pytest.mark.parametrize("elements", LENGTHS)
def test_any_length_arrives_with_the_same_bytes(elements: int) -> None:
    vector = vector_of(elements)
    receiver = transfer(vector)
    receiver.end(hashlib.sha256(vector.tobytes()).hexdigest())
    assert receiver.buffer.tobytes() == vector.tobytes()
    assert digest(vector) == OutgoingVector(1, vector).end() == hashlib.sha256(vector.tobytes()).hexdigest()


@settings(max_examples=40)
@given(st.sampled_from(LENGTHS), st.data())
def test_any_interleaving_of_blocks_and_credits_arrives_within_the_window(elements: int, data: st.DataObject) -> None:
    vector = vector_of(elements)
    sender, receiver = OutgoingVector(1, vector), receiver_of(vector)
    blocks: deque[tuple[int, memoryview]] = deque()  # under way down
    credits: list[int] = [receiver.upto]  # under way up; may overtake each other
    while not sender.all_sent or blocks:
        choices = ["credit"] * bool(credits) + ["block"] * bool(blocks)
        if data.draw(st.sampled_from(choices)) == "credit":
            sender.credit(credits.pop(data.draw(st.integers(0, len(credits) - 1))))
            blocks.extend(sender.blocks())
            assert list(sender.blocks()) == []  # each block goes once
        else:
            receiver.block(*blocks.popleft())
            credits.append(receiver.upto)
        assert len(blocks) <= WINDOW
        assert sender.sent <= receiver.received + WINDOW
    receiver.end(sender.end())
    assert receiver.buffer.tobytes() == vector.tobytes()


def test_nothing_goes_without_credit() -> None:
    sender = OutgoingVector(1, vector_of(max(LENGTHS)))
    assert list(sender.blocks()) == []
    for useless in (0, -5):
        sender.credit(useless)
    assert list(sender.blocks()) == []
    sender.credit(2)
    assert [index for index, _ in sender.blocks()] == [0, 1]
    sender.credit(1)
    assert list(sender.blocks()) == []
    sender.credit(10**9)
    assert [index for index, _ in sender.blocks()] == list(range(2, block_count(max(LENGTHS))))


def test_the_first_credit_is_one_window_or_the_whole_of_a_short_vector() -> None:
    assert receiver_of(vector_of(max(LENGTHS))).upto == WINDOW
    assert receiver_of(vector_of(BLOCK_ELEMENTS + 1)).upto == 2
    assert receiver_of(vector_of(0)).upto == 0


def test_blocks_are_views_of_the_vector_and_not_copies() -> None:
    vector = np.zeros(BLOCK_ELEMENTS + 1, np.float32)
    sender = OutgoingVector(1, vector)
    sender.credit(2)
    blocks = dict(sender.blocks())
    vector[-1] = 1
    assert np.frombuffer(blocks[1], np.float32)[0] == 1


@pytest.mark.parametrize("wrong", [-1, 0, 2, 3, 4, 10**6])
def test_a_block_out_of_order_or_repeated_is_refused_and_changes_nothing(wrong: int) -> None:
    vector = vector_of(BLOCK_ELEMENTS * 7 // 2)
    sender, receiver = OutgoingVector(1, vector), receiver_of(vector)
    sender.credit(4)
    blocks = dict(sender.blocks())
    receiver.block(0, blocks[0])
    with pytest.raises(WireError, match=f"block {wrong} of vector 1 where 1 was due"):
        receiver.block(wrong, blocks.get(wrong, blocks[0]))
    for index in (1, 2, 3):
        receiver.block(index, blocks[index])
    receiver.end(digest(vector))
    assert receiver.buffer.tobytes() == vector.tobytes()


@pytest.mark.parametrize("elements", [1, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1, BLOCK_ELEMENTS * 7 // 2])
def test_a_block_too_short_or_too_long_is_refused_and_changes_nothing(elements: int) -> None:
    vector = vector_of(elements)
    sender, receiver = OutgoingVector(1, vector), receiver_of(vector)
    sender.credit(block_count(elements))
    for index, block in sender.blocks():
        before = receiver.buffer.tobytes()
        for wrong in (
            block[:-1],
            block[:-4],
            block[:0],
            bytes(block) + b"\0",
            bytes(block) * 2,
            bytes(BLOCK_BYTES + 4),
        ):
            with pytest.raises(WireError, match=f"block {index} of vector 1 has {len(wrong)} bytes"):
                receiver.block(index, memoryview(wrong))
        assert receiver.buffer.tobytes() == before
        receiver.block(index, block)
    receiver.end(digest(vector))


@pytest.mark.parametrize("elements", [0, 1, BLOCK_ELEMENTS])
def test_a_block_beyond_the_end_is_refused(elements: int) -> None:
    receiver = transfer(vector_of(elements))
    for payload in (b"", b"1234", bytes(BLOCK_BYTES)):
        with pytest.raises(WireError):
            receiver.block(block_count(elements), memoryview(payload))


@settings(max_examples=30)
@given(st.data())
def test_one_flipped_bit_is_refused(data: st.DataObject) -> None:
    vector = vector_of(BLOCK_ELEMENTS + 1)
    sender, receiver = OutgoingVector(1, vector), receiver_of(vector)
    sender.credit(2)
    blocks = {index: bytearray(block) for index, block in sender.blocks()}
    bit = data.draw(st.integers(0, 8 * vector.nbytes - 1))
    byte = bit // 8
    blocks[byte // BLOCK_BYTES][byte % BLOCK_BYTES] ^= 1 << bit % 8
    for index, block in blocks.items():
        receiver.block(index, memoryview(block))
    with pytest.raises(WireError, match="does not have the hash"):
        receiver.end(sender.end())


@pytest.mark.parametrize("wrong", ["", "0" * 64, "not a hash", hashlib.sha256(b"").hexdigest()])
def test_another_hash_is_refused(wrong: str) -> None:
    with pytest.raises(WireError, match="does not have the hash"):
        transfer(vector_of(1)).end(wrong)


@pytest.mark.parametrize("sent", [0, 1, 3])
def test_an_end_before_the_last_block_is_refused(sent: int) -> None:
    vector = vector_of(BLOCK_ELEMENTS * 7 // 2)
    sender, receiver = OutgoingVector(1, vector), receiver_of(vector)
    sender.credit(sent)
    for index, block in sender.blocks():
        receiver.block(index, block)
    with pytest.raises(WireError, match=f"ended after {sent} of 4 blocks"):
        receiver.end(digest(vector))


def test_swapped_blocks_of_the_same_size_are_refused() -> None:
    vector = vector_of(2 * BLOCK_ELEMENTS)
    sender, receiver = OutgoingVector(1, vector), receiver_of(vector)
    sender.credit(2)
    blocks = dict(sender.blocks())
    receiver.block(0, blocks[1])
    receiver.block(1, blocks[0])
    with pytest.raises(WireError, match="does not have the hash"):
        receiver.end(digest(vector))


def test_a_vector_that_goes_to_many_is_hashed_once() -> None:
    vector = vector_of(max(LENGTHS))
    shared = VectorHash(vector)
    senders = [OutgoingVector(stream, vector, shared) for stream in range(3)]
    for sender, upto in zip(senders, (2, 1, 3), strict=True):
        sender.credit(upto)
        assert len(list(sender.blocks())) == min(upto, block_count(len(vector)))
    assert {sender.end() for sender in senders} == {digest(vector)}
