"""Clusters that are not of equal and faithful Macs: mixes of chips, losses, joins, a slow Mac; and those of the bed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from mlxdist.coordinator.config.schema import TimingConfig
from scripts.bench_cluster import equal_shares
from scripts.scaling_models import Assumed, Bed
from scripts.simulate_cluster import CALM, LEAVES, TOKENS, Cell, office_of
from scripts.simulated_cluster import SimulatedCluster
from scripts.simulated_office import Mac, Office, equal_leaves

LEAF_TOKENS = 8  # of the bed
SEEDS = 6  # over which uneven shares are averaged


@dataclass(frozen=True)
class Mixed:
    """A mix of chips: its speed in Macs of the slowest kind, and its speedup over one of them."""

    chips: Mapping[str, int]
    worth: float
    speedup: float
    nodes: int  # that were given leaves


def mixed(chips: Mapping[str, int], model: str, link: str, given: Assumed) -> Mixed:
    """Returns the usual step of a mix, once the speeds are known."""
    speeds = [given.speed(model, chip) for chip, count in chips.items() for _ in range(count)]
    rate = given.links[link]
    macs = tuple(Mac(f"mac-{place:02}", speed, rate) for place, speed in enumerate(speeds))
    office = Office(macs, given.models[model].vector_bytes(8), rate, given.frames, given.delay, timing=CALM)
    cluster, leaves = SimulatedCluster(office), equal_leaves(LEAVES, TOKENS)
    step = [cluster.step(number, leaves) for number in range(7)][-1]
    slowest = min(given.speed(model, chip) for chip in given.chips)
    return Mixed(chips, sum(speeds) / slowest, LEAVES * TOKENS / slowest / step.seconds, step.nodes)


@dataclass(frozen=True)
class Fault:
    """Something that happens in the third of four steps: their seconds, the nodes in each, leaves computed in vain."""

    what: str
    seconds: tuple[float, ...]
    nodes: tuple[int, ...]
    again: int


def faults(given: Assumed) -> list[Fault]:
    """Returns the steps of eight Macs of which one is lost, or slow for one step, and of seven that one joins.

    The Mac is lost without a sign, as when its power fails. The timing is that of a run by default.
    """
    office = replace(office_of(Cell(nodes=8), given), timing=TimingConfig())
    usual = SimulatedCluster(office).step(0, equal_leaves(LEAVES, TOKENS)).seconds
    then, last = 2.5 * usual, office.macs[-1]
    cases = {
        "nothing": last,
        "one Mac is lost in the middle of step 3": replace(last, lost=then),
        "one Mac needs three times as long in step 3": replace(last, slow=(2 * usual, 2.9 * usual, 3.0)),
        "an eighth Mac joins in the middle of step 3": replace(last, joins=then),
    }
    found = []
    for what, mac in cases.items():
        cluster = SimulatedCluster(replace(office, macs=(*office.macs[:-1], mac)))
        steps = [cluster.step(number, equal_leaves(LEAVES, TOKENS)) for number in range(4)]
        again = cluster.fleet.leaves_recomputed()
        found.append(Fault(what, tuple(one.seconds for one in steps), tuple(one.nodes for one in steps), again))
    return found


def bed_office(bed: Bed, nodes: int, megabytes: int, uneven: float, seed: int) -> Office:
    """Returns the cluster of the bed."""
    rate, speed = bed.mbit * 1e6 / 8, LEAF_TOKENS / bed.leaf_seconds
    macs = tuple(Mac(f"mini-{place}", speed, rate) for place in range(nodes))
    bytes_ = megabytes * 1_000_000
    return Office(macs, bytes_, rate, bed.frames, timing=CALM, assigner=equal_shares, uneven=uneven, seed=seed)


def communication(office: Office, leaves: int, leaf_seconds: float) -> float:
    """Returns the median over three steps of their seconds without the computation; `leaves`: of each node."""
    cluster, asked = SimulatedCluster(office), equal_leaves(leaves * len(office.macs), LEAF_TOKENS)
    steps: Sequence[float] = [cluster.step(number, asked).seconds for number in range(4)][1:]
    return median(steps) - leaves * leaf_seconds


def on_the_bed(bed: Bed, nodes: int, megabytes: int) -> tuple[float, float]:
    """Returns the predicted seconds of communication with even shares, and with uneven ones in the mean."""
    even = communication(bed_office(bed, nodes, megabytes, 0.0, 0), bed.leaves, bed.leaf_seconds)
    uneven = fmean(
        communication(bed_office(bed, nodes, megabytes, bed.uneven, seed), bed.leaves, bed.leaf_seconds)
        for seed in range(SEEDS)
    )
    return even, uneven
