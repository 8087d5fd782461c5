"""Speeds of nodes: measured by width and link, smoothed, held, and equal when they nearly are."""

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxdist.coordinator.schedule.node_speeds import LeafWork, Pacing, Speed, TransferTimes, width_class

SHORT, LONG = (100, 100), (1000, 1000)  # tokens and width of a leaf


def speed_of(tokens_per_second: float = 0.0, up: float = 0.0, down: float = 0.0) -> Speed:
    speed = Speed()
    for _ in range(2 if tokens_per_second else 0):
        speed.leaf("gradient", SHORT, SHORT[0] / tokens_per_second)
    speed.sent_up(up)
    speed.sent_down(down)
    return speed


def leaf_seconds(
    pacing: Pacing, speeds: Mapping[str, Speed], size: LeafWork = SHORT, leaves: int = 4
) -> dict[str, float]:
    """Of the first leaf, by node."""
    found = pacing.seconds("gradient", [size] * leaves, speeds)
    assert list(found) == list(speeds)
    return {name: node.leaves[0] for name, node in found.items()}


# ---- measuring


def test_later_measurements_move_an_estimate_slowly() -> None:
    speed = Speed()
    for seconds in (2.0, 2.0, 1.0):
        speed.leaf("gradient", SHORT, seconds)
    assert speed.per_token("gradient", 100) == pytest.approx((0.7 * 2 + 0.3 * 1) / 100)


def test_the_first_leaf_of_a_width_is_forgotten_when_the_second_is_faster() -> None:
    speed = Speed()
    speed.leaf("gradient", SHORT, 9.0)  # kernels were compiled
    assert speed.per_token("gradient", 100) == 0  # not believed yet
    speed.leaf("gradient", SHORT, 1.0)
    assert speed.per_token("gradient", 100) == pytest.approx(1 / 100)
    assert speed.tokens_per_second == pytest.approx(100)


def test_each_width_has_its_own_speed_and_an_unknown_one_that_of_the_nearest() -> None:
    speed = Speed()
    for _ in range(2):
        speed.leaf("gradient", SHORT, 1.0)
        speed.leaf("gradient", LONG, 40.0)
    assert speed.per_token("gradient", 100) == pytest.approx(0.01)
    assert speed.per_token("gradient", 1000) == pytest.approx(0.04)
    assert speed.per_token("gradient", 8000) == pytest.approx(0.04)
    assert speed.per_token("gradient", 7) == pytest.approx(0.01)


def test_a_score_is_a_third_of_a_gradient_until_it_is_measured() -> None:
    speed = speed_of(100.0)
    assert speed.per_token("score", 100) == pytest.approx(0.01 / 3)
    speed.leaf("score", SHORT, 0.5)
    speed.leaf("score", SHORT, 0.5)
    assert speed.per_token("score", 100) == pytest.approx(0.005)
    assert speed.tokens_per_second == 100


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, -math.inf, math.nan])
def test_a_time_that_is_none_changes_nothing(seconds: float) -> None:
    speed = speed_of(100.0, 1.0, 2.0)
    before = speed.copy()
    speed.leaf("gradient", SHORT, seconds)
    speed.sent_up(seconds)
    speed.sent_down(seconds)
    assert speed == before


def test_what_is_doubted_is_replaced_by_the_next_measurement() -> None:
    speed = speed_of(1.0, up=10.0, down=20.0)
    speed.leaf("gradient", LONG, 1e6)
    speed.doubt()
    speed.leaf("gradient", SHORT, 1.0)
    speed.sent_down(2.0)
    assert speed.per_token("gradient", 100) == speed.per_token("gradient", 1000) == pytest.approx(0.01)
    assert (speed.down, speed.up) == (2.0, pytest.approx(1.0))  # a link ten times as fast, both ways until measured
    speed.sent_up(4.0)
    assert speed.up == 4.0
    speed.sent_up(8.0)
    assert speed.up == pytest.approx(0.7 * 4 + 0.3 * 8)


def test_widths_of_one_class_are_near_each_other() -> None:
    for width in range(1, 5000):
        assert width_class(width) <= width_class(width + 1)
        assert width_class(2 * width) == width_class(width) + 2


def test_a_transfer_that_nobody_saw_begin_has_no_time() -> None:
    transfers = TransferTimes()
    transfers.begin("up", "a", 1, 10.0)
    transfers.begin("down", "a", 1, 11.0, version=7)
    transfers.begin("up", "b", 1, 12.0)
    transfers.drop("b")
    assert transfers.end("up", "a", 1, 13.0) == (3.0, -1)
    assert transfers.end("up", "a", 1, 14.0) == (0.0, -1)
    assert transfers.end("down", "a", 1, 14.0) == (3.0, 7)
    assert transfers.end("up", "b", 1, 14.0) == (0.0, -1)


# ---- what a split is made with


def test_nodes_within_a_tenth_of_each_other_count_as_equal() -> None:
    found = leaf_seconds(Pacing(), {"b": speed_of(100.0), "a": speed_of(105.0), "c": speed_of(109.0)})
    assert len(set(found.values())) == 1


def test_a_node_that_is_clearly_slower_is_told_apart() -> None:
    assert leaf_seconds(Pacing(), {"a": speed_of(100.0), "b": speed_of(50.0)}) == {"a": 1.0, "b": 2.0}


def test_a_node_with_another_link_is_told_apart_although_it_computes_alike() -> None:
    near, far = speed_of(100.0, up=0.1, down=0.1), speed_of(100.0, up=5.0, down=4.0)
    found = Pacing().seconds("gradient", [SHORT] * 4, {"near": near, "far": far}, here=["near"])
    assert [(node.leaves[0], node.partial, node.start) for node in found.values()] == [(1.0, 0.1, 0.0), (1.0, 5.0, 4.0)]


def test_scores_have_no_partials() -> None:
    found = Pacing().seconds("score", [SHORT] * 4, {"a": speed_of(100.0, up=5.0), "b": speed_of(10.0, up=5.0)})
    assert [node.partial for node in found.values()] == [0.0, 0.0]


def test_a_node_not_measured_yet_is_as_fast_as_the_mean_of_the_others() -> None:
    found = leaf_seconds(Pacing(), {"a": speed_of(100.0), "new": speed_of(), "b": speed_of(20.0)})
    assert found == {"a": 1.0, "new": 3.0, "b": 5.0}


def test_before_the_first_measurement_all_are_equal_and_a_partial_weighs_nothing() -> None:
    found = Pacing().seconds("gradient", [SHORT, LONG], {"a": Speed(), "b": Speed()})
    assert {tuple(node.leaves) for node in found.values()} == {(100.0, 1000.0)}
    assert all(node.partial < 1 for node in found.values())


def test_estimates_are_held_until_a_nodes_share_moves_by_more_than_a_tenth() -> None:
    pacing, speeds = Pacing(), {"a": speed_of(100.0), "b": speed_of(50.0)}
    first = leaf_seconds(pacing, speeds)
    for seconds in (1.3, 1.0, 0.9, 1.25):  # by at most 9 % from what is held
        speeds["a"].leaf("gradient", SHORT, seconds)
        assert leaf_seconds(pacing, speeds) == first
    while speeds["b"].per_token("gradient", 100) < 1.1 * 2 / 100:
        assert leaf_seconds(pacing, speeds) == first
        speeds["b"].leaf("gradient", SHORT, 3.0)
    moved = leaf_seconds(pacing, speeds)
    assert moved["b"] > 2.2
    assert moved["a"] != first["a"]  # all are taken again


def test_a_link_that_moves_moves_the_split_only_where_it_matters() -> None:
    pacing, speeds = Pacing(), {"a": speed_of(1.0, up=0.01), "b": speed_of(0.5, up=0.01)}
    first = pacing.seconds("gradient", [SHORT] * 4, speeds)
    speeds["a"].sent_up(0.1)  # of a share that takes minutes
    assert pacing.seconds("gradient", [SHORT] * 4, speeds) == first
    for _ in range(20):
        speeds["a"].sent_up(100.0)
    assert pacing.seconds("gradient", [SHORT] * 4, speeds)["a"].partial > 50


@given(st.lists(st.just(0.0) | st.floats(1e-3, 1e9), min_size=1, max_size=9))
def test_every_node_takes_some_time(measured: list[float]) -> None:
    found = leaf_seconds(Pacing(), {f"node-{index}": speed_of(value) for index, value in enumerate(measured)})
    assert len(found) == len(measured)
    assert all(value > 0 for value in found.values())
