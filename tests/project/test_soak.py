"""The soak test: the plan depends only on the seed, every stopped process continues, and lost nodes are replaced."""

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from scripts.local_cluster import Events
from scripts.soak_plan import KINDS, MOST_NODES, NODES, Fault, Hurting, plan


def test_a_plan_is_the_same_for_the_same_seed_and_has_every_kind() -> None:
    one, two, other = (list(islice(plan(seed, 4.0), 400)) for seed in (1, 1, 2))
    assert one == two != other
    assert {fault.kind for fault in one} == set(KINDS)
    assert sum(fault.after for fault in one) / 400 == pytest.approx(4.0, rel=0.3)


@dataclass
class FakeProcess:
    """A process that remembers its signals; SIGKILL and SIGTERM end it."""

    signals: list[signal.Signals] = field(default_factory=list)
    ended: bool = False

    def send_signal(self, number: signal.Signals) -> None:
        self.signals.append(number)
        self.ended = self.ended or number in (signal.SIGKILL, signal.SIGTERM)

    @property
    def stopped(self) -> bool:
        last = [number for number in self.signals if number in (signal.SIGSTOP, signal.SIGCONT)][-1:]
        return last == [signal.SIGSTOP] and not self.ended


@dataclass
class FakeCluster:
    """Nodes of two fake processes each. A worker ends with its supervisor; an ended worker is restarted."""

    nodes: dict[str, tuple[FakeProcess, FakeProcess]] = field(default_factory=dict)
    ever: list[FakeProcess] = field(default_factory=list)

    def start_node(self, name: str) -> None:
        assert name not in self.nodes
        self.nodes[name] = (FakeProcess(), FakeProcess())
        self.ever += self.nodes[name]

    def alive(self) -> list[str]:
        return sorted(name for name, (supervisor, _) in self.nodes.items() if not supervisor.ended)

    def supervisor(self, name: str) -> FakeProcess:
        return self.nodes[name][0]

    def worker(self, name: str) -> FakeProcess:
        supervisor, worker = self.nodes[name]
        if worker.ended:
            worker = FakeProcess()
            self.nodes[name] = (supervisor, worker)
            self.ever.append(worker)
        return worker


@dataclass
class World:
    cluster: FakeCluster = field(default_factory=FakeCluster)
    now: float = 0.0

    def __post_init__(self) -> None:
        for number in range(NODES):
            self.cluster.start_node(f"node-{number + 1}")
        cluster: Any = self.cluster
        self.hurting = Hurting(cluster, clock=lambda: self.now)

    def pass_time(self, seconds: float, look: Callable[[], None] = lambda: None) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += max(self.hurting.act(), 0.01)
            look()


def test_after_all_faults_every_process_continues_and_there_are_enough_nodes() -> None:
    world = World()

    def not_too_many() -> None:
        assert len(world.cluster.alive()) <= MOST_NODES

    for fault in islice(plan(3, 1.0), 300):
        world.pass_time(fault.after, not_too_many)
        world.hurting.hurt(fault)
    assert world.hurting.done.total() > 250
    world.pass_time(60)
    assert not any(process.stopped for process in world.cluster.ever)
    assert len(world.cluster.alive()) >= NODES


def test_both_processes_of_a_stopped_node_are_stopped_for_its_time() -> None:
    world = World()
    world.hurting.hurt(Fault(0.0, "stop a node for long", 0.0, 5.0))
    node = world.cluster.nodes["node-1"]
    world.pass_time(4.9)
    assert all(process.stopped for process in node)
    world.pass_time(0.2)
    assert not any(process.stopped for process in node)


def test_a_slowed_worker_runs_a_quarter_of_the_time() -> None:
    world = World()
    world.hurting.hurt(Fault(0.0, "slow a worker", 0.0, 6.0))
    stopped: list[bool] = []
    world.pass_time(6.0, lambda: stopped.append(world.cluster.worker("node-1").stopped))
    assert world.cluster.worker("node-1").signals.count(signal.SIGSTOP) > 20
    world.pass_time(1.0)
    assert not world.cluster.worker("node-1").stopped


def test_a_node_that_gave_up_is_replaced() -> None:
    world = World()
    world.cluster.supervisor("node-2").ended = True
    world.pass_time(1.0)
    assert len(world.cluster.alive()) == NODES


def test_complete_events_are_read_once_and_again_when_a_resumed_run_writes_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    events = Events(path)
    assert events.news() == []
    path.write_text('{"event": "train", "step": 1}\n{"event": "tr')
    assert events.news() == [{"event": "train", "step": 1}]
    with path.open("a") as more:
        more.write('ain", "step": 2}\n')
    assert (events.news(), events.steps) == ([{"event": "train", "step": 2}], 2)
    aside = tmp_path / "aside"
    aside.write_text('{"event": "train", "step": 1}\n')
    aside.rename(path)
    events.news()
    assert (events.told, events.steps) == ([{"event": "train", "step": 1}], 1)
