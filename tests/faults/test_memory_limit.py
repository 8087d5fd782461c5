"""A worker that may not take more memory: it ends, is named, its leaves are computed elsewhere, and no bit changes."""

import resource
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from mlxdist.coordinator.config.schema import LoraConfig, RunConfig
from mlxdist.protocol import messages as m
from tests.faults.fault_nodes import FaultNodes, a, none
from tests.faults.fault_proxy import DOWN
from tests.faults.fault_runs import CALM, config_of, sha, told, train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="macOS does not enforce RLIMIT_AS"),
]

STEP, STEPS = 2, 5
RANK = 9300  # a vector has 35 MB, which malloc always asks the system for
MORE = 1 << 20  # bytes of addresses beside those that a worker has
FOR_A_SUPERVISOR = 256 << 20  # enough for it, and too little for mlx in a worker that it starts


def limit(process: psutil.Process, more: int) -> None:
    """Lets a process, and those that it starts, have so many bytes of addresses more."""
    most = process.memory_info().vms + more
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

    def no_more(name: str) -> None:
        limit(nodes.supervisor(name), FOR_A_SUPERVISOR)
        limit(nodes.worker(name), MORE)

    caught = nodes.catch(
        DOWN, lambda _, message: a(m.Assignment, step=STEP, verb="gradient")(message), lambda name, _: no_more(name)
    )
    given_up = nodes.catch(
        DOWN,
        lambda name, message: name != caught.name and a(m.Assignment, step=STEP + 2)(message),
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
