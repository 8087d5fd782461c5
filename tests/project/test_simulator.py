"""The laws of scripts/simulate_cluster.py: it agrees with formulas where there are some, and counts what it says."""

import math
from dataclasses import replace

import pytest

from mlxdist.protocol.transport import Parcel
from scripts.scaling_models import assumed
from scripts.scaling_page import aim, page
from scripts.scaling_scenarios import bed_office, communication, mixed
from scripts.simulate_cluster import COUNTS, PAGE, Cell, over_nodes, predict, sliced_pays, worthwhile
from scripts.simulated_cluster import SimulatedCluster, usual_step
from scripts.simulated_links import fair_rates
from scripts.simulated_office import Mac, Office, equal_leaves

SPEED, TOKENS, VECTOR, RATE = 100.0, 50, 1_000_000, 1e6


def office(nodes: int, **changes: object) -> Office:
    """Returns equal Macs on links without limits, unless a test says otherwise."""
    macs = tuple(Mac(f"mac-{place}", SPEED) for place in range(nodes))
    return replace(Office(macs, VECTOR), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("nodes", [1, 2, 4, 8, 16])
def test_on_links_without_limits_n_nodes_are_n_times_as_fast(nodes: int) -> None:
    step = usual_step(office(nodes), 32, TOKENS)
    assert step.seconds == pytest.approx(32 / nodes * TOKENS / SPEED)
    assert (step.nodes, step.summed) == (nodes, 32)


def test_one_node_needs_its_leaves_and_the_vector_down_and_up() -> None:
    step = usual_step(office(1, bytes_per_second=RATE, frames=1.05, delay=0.0001), 8, TOKENS)
    formula = 8 * TOKENS / SPEED + 2 * 1.05 * VECTOR / RATE
    assert step.seconds == pytest.approx(formula, rel=1e-3)
    assert step.partials == 1


def test_a_star_of_equal_nodes_needs_the_bound_of_its_cable() -> None:
    step = usual_step(office(4, bytes_per_second=RATE), 8, TOKENS)
    assert step.seconds == pytest.approx(2 * TOKENS / SPEED + 8 * VECTOR / RATE, rel=1e-3)


class Counting(SimulatedCluster):
    """A cluster whose hub counts the bytes of the frames that pass."""

    passed = 0

    def receive(self, timeout: float) -> list[Parcel]:
        arrived = super().receive(timeout)
        self.passed += sum(memoryview(frame).nbytes for parcel in arrived for frame in parcel.frames)
        return arrived

    def send(self, parcel: Parcel) -> bool:
        self.passed += sum(memoryview(frame).nbytes for frame in parcel.frames)
        return super().send(parcel)


def test_the_bytes_are_those_of_the_messages_and_a_stand_in_counts_as_much_as_the_vector_itself() -> None:
    elements = 600_000  # three blocks
    real = Counting(office(3, vector_bytes=4 * elements, elements=elements))
    for number in range(2):
        before = real.passed
        step = real.step(number, equal_leaves(6, TOKENS))
    assert step.bytes_up + step.bytes_down == real.passed - before
    stand_in = usual_step(office(3, vector_bytes=4 * elements), 6, TOKENS, warm=1)
    assert stand_in.bytes_down == pytest.approx(step.bytes_down, rel=1e-3)
    assert stand_in.bytes_up == pytest.approx(step.bytes_up, rel=1e-3)
    assert step.bytes_down > 3 * 4 * elements


def test_a_node_that_is_lost_or_joins_leaves_no_leaf_out() -> None:
    usual = office(4, bytes_per_second=RATE)
    macs = (usual.macs[0], replace(usual.macs[1], lost=3.0), replace(usual.macs[2], joins=20.0), usual.macs[3])
    cluster = SimulatedCluster(replace(usual, macs=macs))
    steps = [cluster.step(number, equal_leaves(12, TOKENS)) for number in range(5)]
    assert [step.summed for step in steps] == [12] * 5
    assert [steps[0].nodes, steps[-1].nodes] == [2, 3]  # one of three was lost, and a fourth came
    assert cluster.nodes["mac-2"].leaves > 0
    assert cluster.cluster.nodes["mac-1"].gone


def test_a_slow_node_gets_fewer_leaves_and_the_same_seed_gives_the_same_steps() -> None:
    usual = office(4, bytes_per_second=RATE, uneven=0.5, seed=3)
    slow = replace(usual.macs[3], tokens_per_second=SPEED / 3, spread=0.2)
    straggling = replace(usual, macs=(*usual.macs[:3], slow))

    def steps(given: Office) -> list[float]:
        cluster = SimulatedCluster(given)
        found = [cluster.step(number, equal_leaves(20, TOKENS)).seconds for number in range(3)]
        assert 0 < cluster.nodes["mac-3"].leaves < cluster.nodes["mac-0"].leaves
        return found

    assert steps(straggling) == steps(straggling)
    assert steps(straggling) != steps(replace(straggling, seed=4))


def test_cables_share_by_weight_and_what_a_slow_one_leaves_goes_to_the_others() -> None:
    assert fair_rates(12.0, {"a": (math.inf, 1.0), "b": (math.inf, 2.0)}) == {"a": 4.0, "b": 8.0}
    assert fair_rates(12.0, {"a": (2.0, 1.0), "b": (math.inf, 1.0)}) == {"a": 2.0, "b": 10.0}
    assert fair_rates(math.inf, {"a": (2.0, 1.0), "b": (math.inf, 1.0)}) == {"a": 2.0, "b": math.inf}


def test_the_vector_of_a_model_has_the_size_that_is_known() -> None:
    assert assumed().models["8B"].vector_bytes(8) == 4 * 20_971_520


def test_four_minis_reach_the_aim_on_paper_and_a_sliced_sum_is_never_slower_than_the_star() -> None:
    found = over_nodes(Cell(), COUNTS, assumed())
    assert found[2].speedup >= 3.6
    assert all(one.sliced <= one.step.seconds for one in found)
    assert worthwhile(found) < COUNTS[-1]
    assert sliced_pays(found) in COUNTS


def test_sixty_four_nodes_all_get_leaves() -> None:
    assert predict(Cell(nodes=64, leaves=128, link="10 GbE"), assumed()).step.nodes == 64


def test_a_mix_of_chips_is_as_fast_as_all_of_them_where_the_leaves_are_many_enough() -> None:
    found = mixed({"M4": 1, "M4-Pro": 1}, "8B", "Thunderbolt", assumed())
    assert found.speedup == pytest.approx(found.worth, rel=0.05)


def test_even_shares_take_the_bound_on_the_bed_and_uneven_ones_less() -> None:
    bed = assumed().bed
    even, uneven = (
        communication(bed_office(bed, 4, 10, uneven, seed=1), bed.leaves, bed.leaf_seconds) for uneven in (0.0, 0.5)
    )
    assert even == pytest.approx(8 * 10 * 8 / bed.mbit * bed.frames, rel=1e-3)
    assert uneven < even


def test_the_first_table_of_the_page_is_what_the_script_predicts() -> None:
    """To write the page again: python -m scripts.simulate_cluster --write"""
    assert aim(over_nodes(Cell(), COUNTS, assumed()), assumed()) in PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_is_what_the_script_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(assumed())
