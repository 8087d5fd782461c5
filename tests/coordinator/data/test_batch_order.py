"""The order of the data: windows, steps, epochs and their ends, a pure function of lengths and configuration."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxdist.coordinator.batch.batch_order import steps, steps_per_epoch, total_steps
from mlxdist.coordinator.batches import iterate_dpo_batches, iterate_sft_batches
from mlxdist.coordinator.config.schema import BatchConfig, TrainConfig
from mlxdist.coordinator.dataset import DpoExample, SftExample

LENGTHS = [21, 22, 4, 33, 28, 13, 22, 9, 60, 2, 17]  # 11 rows


def batch(method: str = "sft", **values: object) -> BatchConfig:
    return BatchConfig(order="sorted" if method == "sft" else "shuffled", **values)  # type: ignore[arg-type]


def test_sft_windows_are_those_of_the_reference_batches() -> None:
    examples = [SftExample([row] * length, 0) for row, length in enumerate(LENGTHS)]
    expected = [[ids[0] for ids in b.ids] for b in islice(iterate_sft_batches(examples, 3, 99, 8, True), 12)]
    made = islice(steps(LENGTHS, batch(size=3, seed=8), "sft"), 12)
    assert [step.rows for step in made] == expected


def test_dpo_and_kto_windows_are_those_of_the_reference_batches() -> None:
    examples = [DpoExample([row, 1], [row, 2], [0, 1], [0, 1]) for row in range(11)]
    expected = [[ids[0] for ids in b.chosen_ids] for b in islice(iterate_dpo_batches(examples, 3, 8, True), 12)]
    for method in ("dpo", "kto"):
        made = islice(steps(LENGTHS, batch(method, size=3, seed=8), method), 12)
        assert [step.rows for step in made] == expected


def test_a_pass_ends_with_a_short_step_and_steps_never_span_passes() -> None:
    config = batch(size=2, grad_accum_steps=2)  # 5 windows: 2 + 2 + 1
    made = list(islice(steps(LENGTHS, config, "sft"), 6))
    assert [len(step.windows) for step in made] == [2, 2, 1, 2, 2, 1]
    assert [step.number for step in made] == [1, 2, 3, 4, 5, 6]
    first, second = ([row for step in made[at : at + 3] for row in step.rows] for at in (0, 3))
    assert sorted(first) == sorted(second)
    assert len(set(first)) == 10


def test_the_cursor_is_the_number_of_steps_done() -> None:
    config = batch("dpo", size=3, grad_accum_steps=2, seed=5)
    whole = list(islice(steps(LENGTHS, config, "dpo"), 9))
    assert list(islice(steps(LENGTHS, config, "dpo"), 4, 9)) == whole[4:]


def test_drop_leaves_the_tail_out_and_keep_trains_it() -> None:
    dropped = {row for step in islice(steps(LENGTHS, batch(size=4), "sft"), 2) for row in step.rows}
    assert dropped == set(range(11)) - {3, 4, 8}  # the three longest fill no window of four
    kept = [step.rows for step in islice(steps(LENGTHS, batch(size=4, remainder="keep"), "sft"), 3)]
    assert sorted(row for rows in kept for row in rows) == list(range(11))
    assert sorted(map(len, kept)) == [3, 4, 4]


def test_a_kept_kto_tail_of_one_row_joins_the_window_before_it() -> None:
    config = batch("kto", size=5, remainder="keep")  # 5 + 5 + 1
    assert [len(step.rows) for step in islice(steps(LENGTHS, config, "kto"), 2)] == [5, 6]
    assert [len(step.rows) for step in islice(steps(LENGTHS, config, "dpo"), 3)] == [5, 5, 1]
    assert (steps_per_epoch(11, config, "kto"), steps_per_epoch(11, config, "dpo")) == (2, 3)


def test_fewer_rows_than_a_window_make_one_under_keep_and_none_under_drop() -> None:
    assert next(steps([5, 3], batch(size=8, remainder="keep"), "sft")).rows == [1, 0]
    assert list(steps([5, 3], batch(size=8), "sft")) == []


@pytest.mark.parametrize(
    ("epochs", "expected"),
    [(1.0, 10), (0.5, 5), (0.05, 1), (1.1, 11), (2.0, 20), (0.3, 3), (0.31, 4), (1000.0, 10_000), (1e-9, 1), (3, 30)],
)
def test_passes_are_the_decimal_that_was_written(epochs: float, expected: int) -> None:
    """p epochs of 10 steps are ceil(p * 10): 1.1 epochs are 11 steps, though 1.1 * 10 > 11 in binary."""
    train = TrainConfig(steps=None, epochs=epochs)
    assert total_steps(train, 20, batch(size=2), "sft") == expected


def test_steps_are_what_they_are_and_hours_leave_them_open() -> None:
    assert total_steps(TrainConfig(steps=7), 20, batch(size=2), "sft") == 7
    assert total_steps(TrainConfig(steps=None, max_hours=8.0), 20, batch(size=2), "sft") is None


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=40),
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from(["drop", "keep"]),
    st.sampled_from(["sft", "dpo", "kto"]),
    st.integers(0, 2**32 - 1),
)
def test_a_pass_has_the_steps_it_says_and_each_row_at_most_once(
    lengths: list[int], size: int, accum: int, remainder: str, method: str, seed: int
) -> None:
    config = batch(method, size=size, grad_accum_steps=accum, remainder=remainder, seed=seed)
    per_epoch = steps_per_epoch(len(lengths), config, method)
    once = list(islice(steps(lengths, config, method), per_epoch))
    rows = [row for step in once for row in step.rows]
    assert len(once) == per_epoch
    assert len(rows) == len(set(rows)) == (len(lengths) if remainder == "keep" else len(lengths) // size * size)
    twice = [step.windows for step in islice(steps(lengths, config, method), per_epoch, 2 * per_epoch)]
    assert sum(map(len, twice)) == sum(len(step.windows) for step in once)
