from collections.abc import Iterator
from functools import partial

import mlx.core as mx
import numpy as np
import psutil
import pytest

from mlxdist.coordinator.memory.node_memory import at_work
from mlxdist.node.process import describe_exit
from mlxdist.node.work.limits import memory_limits
from mlxdist.node.work.memory_pressure import SwapWatch, named_out_of_memory
from mlxdist.protocol.errors import NodeError
from mlxdist.protocol.leaves import Leaf, Row


def leaf(tokens: int, rows: int = 1) -> Leaf:
    row = Row(0, np.zeros(tokens, np.int32), np.ones(tokens, np.uint8))
    return Leaf(0, (row,) * rows)


@pytest.mark.parametrize(
    "words",
    [
        "[malloc] Unable to allocate 80000 bytes.",
        "[METAL] Command buffer failed: Insufficient Memory (0008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        "[metal::malloc] Attempting to allocate 9 bytes which is greater than the maximum allowed buffer size.",
    ],
)
def test_memory_that_ran_out_is_named_with_the_rows_length_and_the_cure(words: str) -> None:
    with (
        pytest.raises(NodeError, match=r"memory ran out at 2 rows of 1400 tokens together") as caught,
        named_out_of_memory(leaf(700, 2), 0),
    ):
        raise RuntimeError(words)
    for cure in ("memory.segment_size = 1", "batch.leaf_tokens below", "batch.max_length below 700"):
        assert cure in str(caught.value)
    assert words[:60] in str(caught.value)


def test_any_other_error_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="shapes"), named_out_of_memory(leaf(7), 0):
        raise RuntimeError("shapes do not match")


def test_a_worker_that_ends_without_a_word_is_named_with_what_it_computed() -> None:
    said = at_work(describe_exit(-11), leaf(900), 0)
    assert said.startswith(" at a row of 900 tokens (if memory ran out: less is needed with memory.segment_size = 1 or")
    assert at_work(describe_exit(1), leaf(900), 0) == ""
    assert at_work(describe_exit(-9), None, 0) == ""


def reads(values: list[int]) -> Iterator[int]:
    yield from values


def test_a_slow_leaf_is_called_swapping_only_when_memory_was_read_back_and_once() -> None:
    steady, swapped = [0] * 7, [0, 0, 0, 0, 0, 2**30, 2**31, 2**31]
    for values, seconds, said in (
        (steady, [1, 1, 1, 1, 1, 9, 1], []),  # slow, for another reason
        (swapped[:6], [1, 1, 1, 1, 1, 1], []),  # read back, but as fast as ever
        (swapped, [1, 1, 1, 1, 1, 9, 9, 9], [5]),
    ):
        numbers = reads(values)
        watch = SwapWatch(read=partial(next, numbers))
        told = [watch.leaf(leaf(100), float(each), 0) for each in seconds]
        assert [place for place, sentence in enumerate(told) if sentence] == said
    assert "9.0 times as long" in (told[5] or "")
    assert "memory.segment_size = 1" in (told[5] or "")


def test_a_long_leaf_is_not_a_slow_one() -> None:
    numbers = reads([0, 0, 0, 0, 0, 2**30])
    watch = SwapWatch(read=lambda: next(numbers))
    for _ in range(5):
        watch.leaf(leaf(100), 1.0, 0)
    assert watch.leaf(leaf(1000), 12.0, 0) is None


def test_limits_hold_while_a_run_is_served_and_are_given_back() -> None:
    before = mx.set_memory_limit(10**9), mx.set_cache_limit(10**8)
    try:
        with memory_limits(4 * 10**8) as held:
            assert held == 4 * 10**8 == mx.get_memory_limit()
            assert mx.set_cache_limit(10**8) == 10**8
        assert mx.get_memory_limit() == 10**9
        with memory_limits(2**60) as held:
            assert held == psutil.virtual_memory().total
        with memory_limits(0) as held:
            assert (held, mx.get_memory_limit()) == (0, 10**9)
    finally:
        mx.set_memory_limit(before[0])
        mx.set_cache_limit(before[1])
