"""How fast the nodes are taken to be: measured, smoothed, and equal when they nearly are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxdist.coordinator.roster import Node, speeds
from mlxdist.protocol.messages import Life
from mlxdist.protocol.states import NodeEvent, NodeState


def node_of(name: str, tokens_per_second: float = 0.0) -> Node:
    return Node(name, Life("run", 1, 1), b"peer", 0.0, tokens_per_second=tokens_per_second)


def test_the_first_measurement_counts_whole_and_later_ones_move_it_slowly() -> None:
    node = node_of("a")
    node.measured(100, 2.0)
    assert node.tokens_per_second == 50
    node.measured(100, 1.0)
    assert node.tokens_per_second == pytest.approx(0.7 * 50 + 0.3 * 100)


def test_nodes_within_a_tenth_of_each_other_count_as_equal() -> None:
    found = speeds([node_of("b", 100.0), node_of("a", 105.0), node_of("c", 109.0)])
    assert list(found) == ["b", "a", "c"]
    assert len(set(found.values())) == 1


def test_a_node_that_is_clearly_slower_is_told_apart() -> None:
    assert speeds([node_of("a", 100.0), node_of("b", 50.0)]) == {"a": 100.0, "b": 50.0}


def test_a_node_not_measured_yet_is_as_fast_as_the_mean_of_the_others() -> None:
    assert speeds([node_of("a", 90.0), node_of("new"), node_of("b", 30.0)]) == {"a": 90.0, "new": 60.0, "b": 30.0}


def test_before_the_first_measurement_all_are_equal() -> None:
    assert len(set(speeds([node_of("a"), node_of("b")]).values())) == 1


@given(st.lists(st.just(0.0) | st.floats(1e-3, 1e9), min_size=1, max_size=9))
def test_every_node_has_a_speed_above_zero(measured: list[float]) -> None:
    found = speeds([node_of(f"node-{index}", value) for index, value in enumerate(measured)])
    assert len(found) == len(measured)
    assert all(value > 0 for value in found.values())


def test_a_node_works_when_it_is_ready_or_busy_and_moves_only_as_the_table_says() -> None:
    node = node_of("a")
    for event, works in (
        (NodeEvent.WORKER_HELLO, False),
        (NodeEvent.CANARY_ANSWERED, True),
        (NodeEvent.ASSIGNED, True),
        (NodeEvent.SILENT, False),
    ):
        node.move(event)
        assert node.works is works
    with pytest.raises(ValueError, match="cannot happen"):
        node.move(NodeEvent.ASSIGNED)
    assert node.state is NodeState.SUSPECT
