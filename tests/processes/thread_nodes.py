"""Real supervisors, sessions, engines and sockets in threads of this process: a node without processes, over loopback.

The thread of the worker keeps one engine while the node runs, as a worker process does.
"""

import os
import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mlxdist.coordinator.cluster.cluster import Cluster
from mlxdist.coordinator.cluster.events import NodeNews
from mlxdist.coordinator.config.run_spec import run_spec
from mlxdist.coordinator.config.schema import DataConfig, LoraConfig, MemoryConfig, RunConfig, TimingConfig
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.fleet.sockets import RouterHub
from mlxdist.coordinator.schedule.rounds import Request
from mlxdist.node.link.sockets import DealerLink
from mlxdist.node.process import Order, Worker
from mlxdist.node.supervisor import Supervisor
from mlxdist.node.work.engine import Engine
from mlxdist.node.work.model import LoadedModel
from mlxdist.node.worker import serve
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol import messages as m
from mlxdist.protocol.leaves import Leaf
from mlxdist.protocol.transport import CONTROL, DATA
from mlxdist.protocol.vectors import Vector
from mlxdist.protocol.versions import package_versions
from tests.coordinator.cluster.scripted_node import new_cluster
from tests.laws.memory_fleet import make_row
from tests.laws.model_folder import VOCABULARY

HERE = "127.0.0.1"
RANK = 400  # gives the adapter of the tiny llama two blocks
LEAVES = 4


class Loads(Engine):
    """An engine that counts how often it loads a model and how often it finds it loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded = self.kept = 0

    def _load(self, spec: m.RunSpec, progress: Any) -> LoadedModel:
        before = self._computer.loaded if self._computer is not None else None
        after = super()._load(spec, progress)
        self.loaded += after is not before
        self.kept += after is before
        return after


@dataclass
class ThreadWorker(Worker):
    """A worker that is a thread."""

    orders: "queue.Queue[Any]" = field(default_factory=queue.Queue)
    thread: threading.Thread | None = None

    def order(self, order: Order) -> None:
        self.orders.put(order)

    def stop(self) -> None:
        self.orders.put(None)
        assert self.thread is not None
        self.thread.join(30)


class ThreadNode:
    """A node that was started by hand, at a control port of `host`."""

    def __init__(self, name: str, host: str, port: int, engine: Engine | None = None) -> None:
        self.engine = engine or Loads()
        self._orphaned = threading.Event()
        link = DealerLink(f"tcp://{host}:{port}", f"{name}/{os.getpid()}".encode())
        self.supervisor = Supervisor(
            name, host, link, launched=False, wait_seconds=120.0, start_worker=self._start_worker
        )
        self._thread = threading.Thread(target=self.supervisor.run, args=(self._orphaned,), daemon=True)
        self._thread.start()

    def _start_worker(self, environment: Mapping[str, str]) -> ThreadWorker:
        process: Any = SimpleNamespace(pid=os.getpid(), poll=lambda: None)
        worker = ThreadWorker(process)
        worker.thread = threading.Thread(target=self._work, args=(worker.orders,), daemon=True)
        worker.thread.start()
        return worker

    def _work(self, orders: "queue.Queue[Any]") -> None:
        while (order := orders.get()) is not None:
            serve(order, orders, self.engine)

    def leave(self) -> None:
        """Leaves soon."""
        self._orphaned.set()

    def close(self) -> None:
        """Leaves, and ends the thread."""
        self.leave()
        self._thread.join(30)
        assert not self._thread.is_alive()


@contextmanager
def thread_nodes(*nodes: tuple[str, str, int]) -> Iterator[list[ThreadNode]]:
    """Starts nodes given as (name, host, port), which leave at the end of the block."""
    started = [ThreadNode(*node) for node in nodes]
    try:
        yield started
    finally:
        for node in started:
            node.close()


@dataclass
class Coordinator:
    """A fleet over real ports, which can crash."""

    hub: RouterHub
    fleet: Fleet
    cluster: Cluster
    told: list[NodeNews]

    @property
    def sentences(self) -> str:
        """All news so far, one line each."""
        return "\n".join(f"{news.name} {news.message}" for news in self.told)

    def gradient(self, step: int = 1) -> Vector:
        """The grad_sum of a step of a few leaves with a fixed adapter."""
        return self.fleet.gradient(request(step))[0].copy()

    def send_adapter(self) -> None:
        """Sends a fixed adapter, the same for every coordinator."""
        elements = manifests.size(self.fleet.wait_for_model().manifest)
        drawn = np.random.default_rng(1).standard_normal(elements) * 0.02
        self.fleet.send_adapter(0, drawn.astype(np.float32))

    def crash(self) -> None:
        """Ends without a message, as after SIGKILL."""
        self.fleet._closing = True
        self.hub.wake()
        assert self.fleet._thread is not None
        self.fleet._thread.join()
        with suppress(Exception):
            self.hub.close()


def request(step: int = 1, leaves: int = LEAVES) -> Request:
    """A step of equal leaves."""
    random = np.random.default_rng(7)
    rows = [make_row(index, random.integers(0, VOCABULARY, 20).tolist(), 5) for index in range(leaves)]
    cut = tuple(Leaf(index, (row,)) for index, row in enumerate(rows))
    return Request("gradient", step, 0, cut)


def config_of(model: Path, *, segment_size: int = 0, rank: int = RANK) -> RunConfig:
    """A run on the tiny llama."""
    memory = MemoryConfig(segment_size=segment_size) if segment_size else MemoryConfig()
    lora = LoraConfig(rank=rank)
    return RunConfig(model=str(model), output=model, data=DataConfig(path="none"), lora=lora, memory=memory)


def start_coordinator(config: RunConfig, port: int, incarnation: int = 1, **changes: Any) -> Coordinator:
    """Starts a coordinator at `port` and `port + 1` of loopback, with short times."""
    hub = RouterHub([HERE], port)
    values = {
        "beat_seconds": 0.1,
        "suspect_seconds": 0.5,
        "dead_seconds": 60.0,  # a loaded machine must not look dead
        "return_seconds": 0.3,
        "restart_seconds": 0.05,
    }
    timing = TimingConfig(**{**values, **changes})
    settings = {
        "spec": run_spec(config),
        "versions": package_versions(),
        "data_port": hub.ports[DATA],
        "timing": timing,
    }
    cluster = new_cluster(incarnation=incarnation, **settings)
    told: list[NodeNews] = []
    fleet = Fleet(cluster, hub, on_news=told.append)
    assert hub.ports[CONTROL] == port
    return Coordinator(hub, fleet, cluster, told)
