"""scripts/bench_model.py on the bed, in small: both kinds of steps are measured, and blocks come meanwhile."""

from pathlib import Path

import pytest

from scripts.bench_cluster import Case
from scripts.bench_model import make_model, measure
from tests.processes.bed_cluster import BedCluster

pytestmark = pytest.mark.slow


def test_a_step_is_measured_with_and_without_a_model_on_its_way(cluster: BedCluster, tmp_path: Path) -> None:
    make_model(tmp_path, 300_000_000)  # half a minute on these cables
    found = measure(cluster.bed, Case(100, "curve", 1, 1, 0.2), tmp_path, steps=1, rounds=1)
    assert found.ratio == found.sending / found.without
    assert found.without > 0.8, "four leaves of 0.2 s"
    assert found.rate >= 0
