"""Leaves are a pure function of the global batch: the longest item into the least filled leaf, batch order inside."""

from itertools import islice
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from mlxdist.coordinator.batch.batch_order import Step, steps, validation_step
from mlxdist.coordinator.batch.leaf_tokens import auto_leaf_tokens, largest_leaf, longest_item, window_tokens
from mlxdist.coordinator.batch.micro_batches import Cut, cut, cut_kl, fill, kl_rows
from mlxdist.coordinator.batch.row_store import StoredRows
from mlxdist.protocol.leaves import item_tokens
from tests.coordinator.data.data_toys import texts, toy_config, toy_read

WINDOWS = ((3, 0, 2), (1, 4))
COSTS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def row_ids(made: Cut) -> list[list[int]]:
    return [[row.row_id for row in leaf.rows] for leaf in made.leaves]


def test_the_longest_item_goes_into_the_leaf_with_the_fewest_tokens_ties_by_place() -> None:
    assert fill([5, 9, 5, 2, 9], 15) == [[0, 1, 3], [2, 4]]
    assert fill([4, 4, 4, 4], 8) == [[0, 2], [1, 3]]
    assert fill([7], 1) == [[0]]
    assert fill([3, 3], 1000) == [[0, 1]]
    assert fill([], 8) == []


@given(COSTS, st.integers(1, 100))
def test_leaves_hold_every_item_once_in_batch_order_and_as_many_tokens_as_was_asked(
    costs: list[int], leaf_tokens: int
) -> None:
    leaves = fill(costs, leaf_tokens)
    assert sorted(place for leaf in leaves for place in leaf) == list(range(len(costs)))
    assert all(leaf and leaf == sorted(leaf) for leaf in leaves)
    assert len(leaves) == min(-(-sum(costs) // leaf_tokens), len(costs))
    filled = [sum(costs[place] for place in leaf) for leaf in leaves]
    assert max(filled) - min(filled) <= max(costs)


@given(COSTS, st.integers(1, 100))
def test_no_leaf_is_larger_than_the_memory_is_reserved_for(costs: list[int], leaf_tokens: int) -> None:
    longest = max(costs)
    limit = max(longest, min(longest, leaf_tokens) + leaf_tokens)
    assert max(sum(costs[place] for place in leaf) for leaf in fill(costs, leaf_tokens)) <= limit


def test_leaves_are_made_of_all_windows_of_a_step_and_the_order_names_their_rows(tmp_path: Path) -> None:
    data = toy_read(tmp_path, texts(5, 6, 7, 8, 9))
    step = Step(1, WINDOWS)
    made = cut(step, data.train, 1000)
    assert row_ids(made) == [[3, 0, 2, 1, 4]]
    tokens = [len(data.train.rows(row)[0].ids) for row in step.rows]
    halves = cut(step, data.train, -(-sum(tokens) // 2))
    assert len(halves.leaves) == 2
    assert [leaf.index for leaf in halves.leaves] == [0, 1]
    assert halves.order == [row for leaf in row_ids(halves) for row in leaf]
    assert sorted(halves.order) == [0, 1, 2, 3, 4]


def test_a_pair_stays_together_and_costs_its_prompt_once(tmp_path: Path) -> None:
    rows = [{"prompt": "prompt", "chosen": "y" * size, "rejected": "n" * (50 - size)} for size in (3, 5, 10)]
    data = toy_read(tmp_path, rows, "dpo", size=3)
    made = cut(Step(1, ((2, 0, 1),)), data.train, 60)
    assert [len(leaf.rows) for leaf in made.leaves] == [2, 2, 2]
    assert all(leaf.branches == 2 and leaf.items == 1 for leaf in made.leaves)
    chosen, rejected = data.train.rows(0)
    prompt = int(chosen.targets.argmax())
    assert item_tokens((chosen, rejected)) == len(chosen.ids) + len(rejected.ids) - prompt
    assert made.leaves[made.order.index(0)].tokens == item_tokens((chosen, rejected))


def test_the_first_round_of_kto_has_the_mismatched_rows(tmp_path: Path) -> None:
    rows = [{"prompt": "p" * size, "completion": "c" * (9 - size), "label": size % 2} for size in range(1, 6)]
    data = toy_read(tmp_path, rows, "kto", size=3)
    step = Step(1, WINDOWS)
    made = cut_kl(step, data.train, 20)
    assert sorted(made.order) == sorted(step.rows)
    found = {row.row_id: row.ids.tolist() for leaf in made.leaves for row in leaf.rows}
    assert found == {row.row_id: row.ids.tolist() for row in kl_rows(data.train, step)}


def test_validation_leaves_are_in_file_order_for_sft_by_length_and_a_limit_takes_the_first_rows(tmp_path: Path) -> None:
    def order(rows: StoredRows, method: str, limit: int = 99) -> list[list[int]]:
        return row_ids(cut(validation_step(rows.lengths, limit, method, 0), rows, 1000))

    data = toy_read(tmp_path, texts(9, 5, 7, 5, 3))
    assert order(data.train, "sft") == [[4, 1, 3, 2, 0]]
    assert order(data.train, "sft", limit=3) == [[1, 2, 0]]
    rows = [{"prompt": "p", "completion": "c" * size, "label": 1} for size in (9, 1, 5)]
    kto = toy_read(tmp_path, rows, "kto", size=2)
    assert order(kto.train, "kto") == [[0, 1, 2]]


def test_leaves_hold_every_row_of_the_step_once(tmp_path: Path) -> None:
    data = toy_read(tmp_path, texts(*range(3, 26)))
    config = toy_config("x", size=4, grad_accum_steps=2).batch
    for step in islice(steps(data.train.lengths.tolist(), config, "sft"), 5):
        made = cut(step, data.train, 40)
        assert sorted(made.order) == sorted(step.rows)
        assert made.order == [row for leaf in row_ids(made) for row in leaf]


def test_auto_is_an_eighth_of_the_median_window_and_at_most_512_tokens(tmp_path: Path) -> None:
    short = toy_read(tmp_path, texts(*[10] * 16))
    config = toy_config("x", size=8).batch
    tokens = window_tokens(short.train, config, "sft")
    assert tokens == 8 * len(short.train.rows(0)[0].ids)
    assert auto_leaf_tokens(short.train, config, "sft") == -(-tokens // 8)
    long = toy_read(tmp_path, texts(*[900] * 8), max_length=1024)
    assert auto_leaf_tokens(long.train, config, "sft") == 512


def test_the_largest_leaf_follows_the_longest_row_after_the_cut(tmp_path: Path) -> None:
    data = toy_read(tmp_path, texts(5, 30, 90), max_length=40, max_cut=1.0)
    config = toy_config("x", size=2, max_length=40).batch
    assert longest_item(data.train, 40) == 40
    assert largest_leaf(data.train, config, 16) == 40
    assert largest_leaf(data.train, config, 64) == 104
