"""scripts/bench_cluster.py on the bed, in small: the numbers are there, and count what they say."""

import pytest

from scripts.bench_cluster import Case, measure
from tests.processes.bed_cluster import BedCluster

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("transport", ["curve", "ssh"])
def test_a_step_is_measured_with_one_partial_for_each_node_and_with_more(cluster: BedCluster, transport: str) -> None:
    even, uneven = measure(cluster.bed, Case(1000, transport, 2, 2, 0.01), steps=1)
    assert (even.leaves, even.partials) == (8, 2)
    assert (uneven.leaves, uneven.partials) == (11, 5)
    assert even.bound == pytest.approx((2 + 2) * 2e6 * 8 / 1e9)
    assert even.step > even.compute > 0
