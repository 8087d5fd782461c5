"""Fifty nodes join a coordinator and leave it. Prints the number of open files after the first ten and after all.

    python -m tests.processes.come_and_go MODEL

The nodes come under old and new names in turn.
"""

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

from mlxdist.node.link.jobs import ComputeCanary, Job, JobResults, LoadModel
from mlxdist.node.work.engine import Engine
from mlxdist.protocol import messages as m
from scripts.local_cluster import free_ports
from tests.coordinator.cluster.scripted_node import CANARY, introduction
from tests.processes.thread_nodes import HERE, Coordinator, ThreadNode, config_of, start_coordinator


class NoModel(Engine):
    """Answers as an engine does, without a model."""

    def perform(self, job: Job, session: m.SessionId, progress: Callable[[str], None]) -> JobResults:
        if isinstance(job, LoadModel):
            yield introduction(session), b""
        elif isinstance(job, ComputeCanary):
            yield m.CanaryAnswer(session, CANARY), b""


def come_and_go(coordinator: Coordinator, port: int, names: list[str]) -> None:
    """Lets all nodes join, get ready and leave."""
    nodes = [ThreadNode(name, HERE, port, NoModel()) for name in names]
    coordinator.fleet.wait_for_nodes(len(names), len(names), 60.0)
    for node in nodes:
        node.leave()
    for node in nodes:
        node.close()
    coordinator.fleet._wait(lambda: None if coordinator.cluster.ready() else True)


def settled(process: psutil.Process, expected: int = 0) -> int:
    """Waits until the number of open files no longer falls (ZeroMQ closes connections later), and returns it."""
    lowest, quiet = process.num_fds(), 0
    while quiet < 40 and lowest > expected:
        threading.Event().wait(0.1)
        now = process.num_fds()
        quiet = 0 if now < lowest else quiet + 1
        lowest = min(lowest, now)
    return lowest


def main(model: Path) -> None:
    """Counts the open files of this process."""
    port, here = free_ports(), psutil.Process()
    coordinator = start_coordinator(config_of(model), port)
    try:
        come_and_go(coordinator, port, [f"node-{place}" for place in range(10)])
        before = settled(here)
        for turn in range(5):
            come_and_go(coordinator, port, [f"node-{place + turn % 2 * 10 * turn}" for place in range(10)])
        print(before, settled(here, before))
    finally:
        coordinator.fleet.close("the test is over")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
