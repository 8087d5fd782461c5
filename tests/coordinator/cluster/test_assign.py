"""Assignments of leaves to nodes: every leaf once, in order, and never later than it must be."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations_with_replacement
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxdist.coordinator.schedule.assign import MAX_UNITS, NodeSeconds, assign
from mlxdist.protocol.tree import Span, subtrees

PARTIAL = 0.01


def seconds(costs: Sequence[float], speeds: Mapping[str, float], partial: float) -> dict[str, NodeSeconds]:
    """Nodes of these speeds, whose links are alike."""
    return {name: NodeSeconds([cost / speed for cost in costs], partial) for name, speed in speeds.items()}


def finish(costs: Sequence[float], speeds: Mapping[str, float], spans: Mapping[str, Span], partial: float) -> float:
    """Seconds until the last node is done, by the definition."""
    total = len(costs)
    return max(
        sum(costs[span.start : span.stop]) / speeds[name] + partial * len(subtrees(total, span))
        for name, span in spans.items()
    )


def every_split(total: int, names: Sequence[str]) -> Iterator[dict[str, Span]]:
    """All contiguous splits in the order of the names; empty spans are left out."""
    for inner in combinations_with_replacement(range(total + 1), len(names) - 1):
        edges = (0, *inner, total)
        yield {name: Span(edges[i], edges[i + 1]) for i, name in enumerate(names) if edges[i] < edges[i + 1]}


@st.composite
def clusters(draw: Callable[..., Any], most_leaves: int, most_nodes: int) -> tuple[list[float], dict[str, float]]:
    costs = draw(st.lists(st.floats(1, 5000), min_size=1, max_size=most_leaves))
    speeds = draw(st.lists(st.floats(0.1, 1e5), min_size=1, max_size=most_nodes))
    # Not in the order of the alphabet: the roster's order is the caller's.
    return costs, {f"node-{(7 * index) % 11}": speed for index, speed in enumerate(speeds)}


@given(clusters(200, 11), st.floats(0, 100))
def test_every_leaf_is_given_once_in_contiguous_runs_in_the_order_of_the_roster(
    cluster: tuple[list[float], dict[str, float]], partial: float
) -> None:
    costs, speeds = cluster
    spans = assign(seconds(costs, speeds, partial))
    assert [name for name in speeds if name in spans] == list(spans)
    assert [leaf for span in spans.values() for leaf in range(span.start, span.stop)] == list(range(len(costs)))
    assert all(len(span) > 0 for span in spans.values())


@pytest.mark.slow
@settings(max_examples=150)
@given(clusters(9, 4), st.sampled_from([0.0, PARTIAL, 0.3, 10.0]))
def test_no_other_split_is_done_earlier(cluster: tuple[list[float], dict[str, float]], partial: float) -> None:
    costs, speeds = cluster
    best = min(finish(costs, speeds, split, partial) for split in every_split(len(costs), tuple(speeds)))
    assert finish(costs, speeds, assign(seconds(costs, speeds, partial)), partial) <= best * (1 + 1e-9)


@settings(max_examples=100)
@given(st.data())
def test_no_other_split_is_done_earlier_where_each_node_has_its_own_widths_and_link(data: st.DataObject) -> None:
    leaves = data.draw(st.integers(1, 7))
    times = st.lists(st.floats(0.01, 50), min_size=leaves, max_size=leaves)
    nodes = {
        name: NodeSeconds(data.draw(times), data.draw(st.floats(0, 20)), data.draw(st.floats(0, 20)))
        for name in "cab"[: data.draw(st.integers(1, 3))]
    }
    best = min(
        max(
            nodes[name].start
            + sum(nodes[name].leaves[span.start : span.stop])
            + nodes[name].partial * len(subtrees(leaves, span))
            for name, span in split.items()
        )
        for split in every_split(leaves, tuple(nodes))
    )
    assert max(nodes[name].of(span) for name, span in assign(nodes).items()) <= best * (1 + 1e-9)


def test_a_node_that_is_slow_at_long_rows_gets_the_short_ones() -> None:
    nodes = {"quadratic": NodeSeconds([1.0] * 4 + [8.0] * 4), "even": NodeSeconds([2.0] * 4 + [2.0] * 4)}
    assert assign(nodes) == {"quadratic": Span(0, 4), "even": Span(4, 8)}


def test_a_node_whose_link_takes_longer_than_the_others_need_for_all_gets_nothing() -> None:
    fast, far = NodeSeconds([1.0] * 8, 0.1, 0.1), NodeSeconds([1.0] * 8, 5.0, 5.0)
    assert assign({"fast": fast, "far": far}) == {"fast": Span(0, 8)}
    assert set(assign({"fast": fast, "near": NodeSeconds([1.0] * 8, 1.0, 1.0)})) == {"fast", "near"}


@pytest.mark.parametrize("nodes", range(1, 10))
@pytest.mark.parametrize("k", range(5))
def test_equally_fast_nodes_get_one_whole_subtree_each_of_n_times_a_power_of_two_leaves(nodes: int, k: int) -> None:
    total = nodes * 2**k
    speeds = dict.fromkeys((f"node-{index}" for index in range(nodes)), 100.0)
    spans = list(assign(seconds([64.0] * total, speeds, PARTIAL)).values())
    assert [len(span) for span in spans] == [2**k] * nodes
    assert all(subtrees(total, span) == [span] for span in spans)


@pytest.mark.parametrize(("nodes", "total"), [(2, 1), (3, 2), (5, 1), (5, 4), (9, 8), (9, 3)])
def test_more_nodes_than_leaves_leave_nodes_out(nodes: int, total: int) -> None:
    spans = assign(seconds([10.0] * total, {f"node-{index}": 5.0 for index in range(nodes)}, PARTIAL))
    assert [len(span) for span in spans.values()] == [1] * total


def test_a_node_that_could_not_make_the_step_shorter_is_spared_a_partial() -> None:
    spans = assign(seconds([10.0] * 4, {"a": 5.0, "b": 5.0, "c": 5.0}, PARTIAL))
    assert [len(span) for span in spans.values()] == [2, 2]


def test_a_node_that_is_far_too_slow_gets_nothing() -> None:
    assert assign(seconds([10.0] * 4, {"slow": 0.001, "fast": 100.0}, PARTIAL)) == {"fast": Span(0, 4)}


def test_a_node_twice_as_fast_gets_twice_the_leaves() -> None:
    spans = assign(seconds([10.0] * 12, {"fast": 200.0, "slow": 100.0}, 0.0))
    assert spans == {"fast": Span(0, 8), "slow": Span(8, 12)}


def test_long_leaves_count_by_their_tokens() -> None:
    spans = assign(seconds([800.0, 100.0, 100.0, 100.0, 100.0, 100.0, 100.0, 100.0, 100.0], {"a": 1.0, "b": 1.0}, 0.0))
    assert spans == {"a": Span(0, 1), "b": Span(1, 9)}


def test_balance_is_given_up_where_more_partials_would_cost_more() -> None:
    # 6 leaves split as 4 + 2 are two subtrees; the even split 3 + 3 needs four, one more each.
    costs, speeds = [1.0] * 6, {"a": 1.0, "b": 1.0}
    assert [len(span) for span in assign(seconds(costs, speeds, 0.0)).values()] == [3, 3]
    assert {len(span) for span in assign(seconds(costs, speeds, 1.5)).values()} == {4, 2}


def test_equal_splits_take_the_fewer_partials_and_the_same_input_gives_the_same_answer() -> None:
    costs, speeds = [64.0] * 11, {"a": 7.0, "b": 7.0, "c": 7.0}
    first = assign(seconds(costs, speeds, PARTIAL))
    assert assign(seconds(list(costs), dict(speeds), PARTIAL)) == first


@pytest.mark.parametrize(("nodes", "leaves"), [(32, 512), (48, 512), (64, 256), (64, 512), (64, 4096)])
def test_each_of_many_equal_nodes_gets_leaves_and_none_more_than_a_quarter_beyond_its_share(
    nodes: int, leaves: int
) -> None:
    spans = assign(seconds([64.0] * leaves, {f"node-{place}": 7.0 for place in range(nodes)}, PARTIAL))
    assert len(spans) == nodes
    assert max(map(len, spans.values())) <= 1.25 * -(-leaves // nodes)


def test_many_leaves_are_split_at_whole_groups_so_that_partials_stay_few() -> None:
    total = 1000
    costs = [float(50 + (37 * index) % 100) for index in range(total)]
    speeds = {"a": 100.0, "b": 130.0, "c": 90.0}
    spans = assign(seconds(costs, speeds, PARTIAL))
    group = 32
    assert -(-total // group) <= MAX_UNITS < -(-total // (group // 2))
    assert all(span.start % group == 0 for span in spans.values())
    # No later than the perfect balance by more than one group on the slowest node, and the partials.
    balanced = sum(costs) / sum(speeds.values())
    assert finish(costs, speeds, spans, PARTIAL) <= balanced + group * 150 / 90 + PARTIAL * 24
