"""The split follows the speed of the nodes: a worker that is really throttled gets fewer leaves, and no bit changes."""

import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from mlxdist.coordinator.config.schema import BatchConfig, RunConfig
from mlxdist.protocol import messages as m
from tests.faults.cpu_limits import throttled
from tests.faults.fault_nodes import FaultNodes, a, none
from tests.faults.fault_proxy import DOWN
from tests.faults.fault_runs import config_of, sha, told, train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="control groups and affinity are Linux's"),
]

STEPS, FROM, LAST = 16, 4, 6  # all steps; the first one with the limit; the last ones, which are compared
LEAVES = 16
MOST_LOAD = 4.0  # processes that want each core; with more, all workers are as slow as a throttled one


def shares(nodes: FaultNodes, name: str) -> dict[int, int]:
    """Number of leaves that a node was given, by step, including copies."""
    found = dict.fromkeys(range(1, STEPS + 1), 0)
    for task in nodes.proxies[name].saw(DOWN, m.Assignment):
        found[task.step] += task.stop - task.start
    return found


def test_leaves_move_from_a_throttled_worker_to_the_other_one_and_no_bit_changes(
    nodes: FaultNodes, model: Path, tmp_path: Path
) -> None:
    def config(name: str) -> RunConfig:
        batch = BatchConfig(size=LEAVES, leaf_tokens=1)  # a leaf for each row
        return replace(config_of(model, tmp_path / name, "sft", steps=STEPS), batch=batch)

    nodes.ready("a")
    assert train(config("alone"), nodes.port) == 0
    nodes.ready("a", "b")
    with ExitStack() as limits:
        nodes.proxies["b"].when(
            DOWN, a(m.Assignment, step=FROM), lambda _: none(limits.enter_context(throttled(nodes.worker("b").pid)))
        )
        assert train(config("two"), nodes.port, 2) == 0
    assert sha(tmp_path / "two") == sha(tmp_path / "alone")
    if os.getloadavg()[0] > MOST_LOAD * (os.cpu_count() or 1):
        pytest.skip("the bits are equal; this machine is too busy for a comparison of speeds")
    fast, slow = shares(nodes, "a"), shares(nodes, "b")
    late = range(STEPS - LAST + 1, STEPS + 1)
    assert sum(slow[step] for step in late) < LEAVES * LAST / 3, (fast, slow)
    assert sum(fast[step] for step in late) > LEAVES * LAST * 2 / 3, (fast, slow)
    assert slow[1] > LEAVES / 3, (fast, slow)
    named = told(tmp_path / "two").count("b ready slows the step down")
    assert named <= 1
    assert named or any(slow[step] for step in late)
