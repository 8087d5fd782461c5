"""A node of scripts/bench_cluster.py: the real supervisor, worker, session and sockets, and an engine that only waits.

    python -m scripts.bench_cluster_node NAME HOST PORT    # the supervisor; its keys are the first line of its input
    python -m scripts.bench_cluster_node                   # its worker

MLXDIST_BENCH holds the elements of a vector and the seconds of a leaf.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from mlxdist.keys.pair import keys_of_line
from mlxdist.node.link.addresses import join_endpoint
from mlxdist.node.link.jobs import ComputeAssignment, ComputeCanary, Job, JobResults, LoadModel, Partial, Result
from mlxdist.node.link.sockets import DealerLink
from mlxdist.node.process import Worker
from mlxdist.node.supervisor import Supervisor
from mlxdist.node.work.engine import Engine
from mlxdist.node.worker import work
from mlxdist.protocol import messages as m
from mlxdist.protocol.tree import Span, subtrees

COMMAND = ("-u", "-m", "scripts.bench_cluster_node")
SETTINGS = "MLXDIST_BENCH"


class WaitingEngine(Engine):
    """An engine without a model: a leaf takes a fixed time, and a partial is a vector of a fixed size."""

    def __init__(self, elements: int, leaf_seconds: float) -> None:
        super().__init__()
        self.elements, self.leaf_seconds = elements, leaf_seconds

    def perform(self, job: Job, session: m.SessionId, progress: Callable[[str], None]) -> JobResults:
        """Yields the results of one job, as the real engine does on the whole graph."""
        match job:
            case LoadModel():
                yield m.Loaded(session, "none", (m.TensorSpec("layers.0.lora", (self.elements,)),)), b""
            case ComputeCanary():
                yield m.CanaryAnswer(session, ("0" * 64,) * 3), b""
            case ComputeAssignment(assignment=asked):
                for span in subtrees(asked.total, Span(asked.start, asked.stop)):
                    yield from self._partial(job, session, span)

    def _partial(self, job: ComputeAssignment, session: m.SessionId, span: Span) -> Iterator[Result]:
        asked = job.assignment
        for leaf in range(span.start, span.stop):
            time.sleep(self.leaf_seconds)
            place = (asked.step, asked.attempt, asked.adapter_version, leaf)
            yield m.LeafAnswer(session, *place, 1, self.leaf_seconds, 0), np.zeros(1, np.float32).tobytes()
        yield Partial(asked, span, np.full(self.elements, span.start, np.float32))


def _start_worker(environment: Mapping[str, str]) -> Worker:
    return Worker.start(environment, COMMAND)


def supervise(name: str, host: str, port: int) -> int:
    """Runs the supervisor until its coordinator has shut down; returns the exit code."""
    keys = keys_of_line(sys.stdin.buffer.readline())
    link = DealerLink(join_endpoint(host, port), name.encode(), keys=keys)
    supervisor = Supervisor(
        name, host, link, launched=True, wait_seconds=120.0, port=port, keys=keys, start_worker=_start_worker
    )
    return supervisor.run(threading.Event())


if __name__ == "__main__":
    if len(sys.argv) == 4:
        sys.exit(supervise(sys.argv[1], sys.argv[2], int(sys.argv[3])))
    elements, leaf_seconds = os.environ[SETTINGS].split()
    work(WaitingEngine(int(elements), float(leaf_seconds)))
