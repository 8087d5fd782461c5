"""Leaves are a pure function of the global batch: cut inside each window, in row order, never re-sorted."""

from itertools import islice
from pathlib import Path

import pytest

from mlxdist.coordinator.batch.batch_order import Step, steps, validation_step
from mlxdist.coordinator.batch.micro_batches import cut, cut_kl, kl_rows
from mlxdist.coordinator.batch.row_store import StoredRows
from mlxdist.protocol.leaves import Leaf
from tests.coordinator.data.data_toys import texts, toy_config, toy_read

WINDOWS = ((3, 0, 2), (1, 4))


def row_ids(leaf: Leaf) -> list[int]:
    return [row.row_id for row in leaf.rows]


@pytest.mark.parametrize(
    ("micro_size", "expected"),
    [(1, [[3], [0], [2], [1], [4]]), (2, [[3, 0], [2], [1, 4]]), (3, [[3, 0, 2], [1, 4]]), (9, [[3, 0, 2], [1, 4]])],
)
def test_windows_are_cut_in_row_order_the_last_leaf_of_each_may_be_short(
    tmp_path: Path, micro_size: int, expected: list[list[int]]
) -> None:
    data = toy_read(tmp_path, texts(5, 6, 7, 8, 9))
    leaves = cut(Step(1, WINDOWS), data.train, micro_size, 64)
    assert [row_ids(leaf) for leaf in leaves] == expected
    assert [leaf.index for leaf in leaves] == list(range(len(expected)))


def test_a_leaf_has_the_width_of_its_own_longest_row_and_one_row_is_not_padded(tmp_path: Path) -> None:
    data = toy_read(tmp_path, texts(5, 33, 34, 60, 100), max_length=70, max_cut=1.0)
    step = Step(1, ((0, 1), (0, 2), (2, 3), (3, 4), (2,)))
    assert [leaf.widths for leaf in cut(step, data.train, 2, 70)] == [(33,), (65,), (65,), (70,), (34,)]


def test_a_pair_is_never_cut_apart_and_its_branches_have_widths_of_their_own(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "chosen": "y" * size, "rejected": "n" * (50 - size)} for size in (3, 5, 10)]
    data = toy_read(tmp_path, rows, "dpo", size=3)
    (first, second) = cut(Step(1, ((2, 0, 1),)), data.train, 2, 64)
    assert [len(row.ids) for row in first.rows] == [12, 42, 5, 49]  # chosen, rejected, chosen, rejected
    assert (first.widths, second.widths) == ((33, 64), (7, 47))
    assert row_ids(first) == [2, 2, 0, 0]


def test_the_first_round_of_kto_has_the_leaves_of_the_second_with_the_mismatched_rows(tmp_path: Path) -> None:
    rows = [{"prompt": "p" * size, "completion": "c" * (9 - size), "label": size % 2} for size in range(1, 6)]
    data = toy_read(tmp_path, rows, "kto", size=3)
    step = Step(1, WINDOWS)
    first, second = cut_kl(step, data.train, 2, 64), cut(step, data.train, 2, 64)
    assert [row_ids(leaf) for leaf in first] == [row_ids(leaf) for leaf in second]
    flat = [row.ids.tolist() for leaf in first for row in leaf.rows]
    assert flat == [row.ids.tolist() for row in kl_rows(data.train, step)]


def test_validation_leaves_are_in_file_order_for_sft_by_length_and_a_limit_takes_the_first_rows(tmp_path: Path) -> None:
    def leaves(rows: StoredRows, method: str, limit: int = 99) -> list[list[int]]:
        return [row_ids(leaf) for leaf in cut(validation_step(rows.lengths, limit, method, 0), rows, 2, 64)]

    data = toy_read(tmp_path, texts(9, 5, 7, 5, 3))
    assert leaves(data.train, "sft") == [[4, 1], [3, 2], [0]]
    assert leaves(data.train, "sft", limit=3) == [[1, 2], [0]]
    rows = [{"prompt": "p", "completion": "c" * size, "label": 1} for size in (9, 1, 5)]
    kto = toy_read(tmp_path, rows, "kto", size=2)
    assert leaves(kto.train, "kto") == [[0, 1], [2]]


def test_leaves_hold_every_row_of_the_step_once(tmp_path: Path) -> None:
    data = toy_read(tmp_path, texts(*range(3, 26)))
    config = toy_config("x", size=4, grad_accum_steps=2).batch
    for step in islice(steps(data.train.lengths.tolist(), config, "sft"), 5):
        leaves = cut(step, data.train, 3, 64)
        assert [row for leaf in leaves for row in row_ids(leaf)] == step.rows
