"""A worker that may not take more memory: it ends, is named, its leaves are computed elsewhere, and no bit changes."""

import resource
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from mlxdist.coordinator.config.schema import LoraConfig, RunConfig
from mlxdist.protocol import messages as m
from tests.faults.fault_nodes import FaultNodes, none
from tests.faults.fault_proxy import DOWN, Seen
from tests.faults.fault_runs import CALM, config_of, sha, told, train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="macOS does not enforce RLIMIT_AS"),
]

STEP, STEPS = 2, 5
RANK = 9300  # a vector has 35 MB, which malloc always asks the system for
FOR_A_SUPERVISOR = 256 << 20  # enough for it, and too little for mlx in a worker that it starts


def limit(process: psutil.Process, most: int) -> None:
    """Gives a process, and those that it starts, no memory beyond so many bytes of addresses; it keeps what it has."""
    process.rlimit(resource.RLIMIT_AS, (most, most))


def config(model: Path, folder: Path) -> RunConfig:
    """A run with a large adapter."""
    timing = replace(CALM, return_seconds=60.0)  # the end of the worker is to be seen, not that of its connection
    return replace(config_of(model, folder, "sft", steps=STEPS, timing=timing), lora=LoraConfig(rank=RANK))


def test_a_worker_without_memory_is_named_and_given_up_and_the_others_go_on(
    nodes: FaultNodes, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    nodes.ready("a")
    assert train(config(model, tmp_path / "whole"), nodes.port) == 0
    nodes.ready("a", "b")

    def no_more(name: str, _: Seen) -> None:
        supervisor = nodes.supervisor(name)
        limit(nodes.worker(name), 0)
        limit(supervisor, supervisor.memory_info().vms + FOR_A_SUPERVISOR)

    # While it computes: in a download libzmq would be the first without memory, and close the connection.
    caught = nodes.catch_answer("gradient", STEP, no_more, left=2)
    given_up = nodes.catch(
        DOWN,
        lambda name, message: caught.done.is_set() and name != caught.name and isinstance(message, m.Assignment),
        lambda *_: none(nodes.processes[caught.name].wait(120)),
    )
    assert train(config(model, folder), nodes.port) == 0
    assert caught.done.is_set()
    assert given_up.done.is_set()
    assert nodes.processes[caught.name].poll() == 1, "its supervisor was told not to try again"
    news = [line for line in told(folder).splitlines() if line.startswith(f"{caught.name} ")]
    assert any(" go to others" in line for line in news), news
    assert any("memory ran out at a row" in line or "the worker " in line for line in news), news
    assert any(f"turned away: {caught.name}: " in line for line in news), news
    assert sha(folder) == sha(tmp_path / "whole")
