"""A whole cluster in virtual time: the real fleet, cluster, scheduler and sum, between modelled nodes and links.

The hub is where time passes: whenever the coordinator waits for messages, the clock goes on to the next event. So the
coordinator itself takes no time, and a simulated hour takes as long as its messages need.
"""

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Literal

import numpy as np

from mlxdist.coordinator.cluster.cluster import Cluster
from mlxdist.coordinator.cluster.placement import Assigner
from mlxdist.coordinator.cluster.settings import ClusterSettings
from mlxdist.coordinator.config.run_spec import run_spec
from mlxdist.coordinator.config.schema import DataConfig, RunConfig, TimingConfig
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.schedule.assign import assign
from mlxdist.coordinator.schedule.rounds import Request
from mlxdist.node.link.jobs import Result
from mlxdist.protocol import messages as m
from mlxdist.protocol.leaves import Leaf, Row
from mlxdist.protocol.transport import DATA, Parcel, Refusal
from mlxdist.protocol.vectors import BLOCK_BYTES, BLOCK_ELEMENTS, Vector
from mlxdist.protocol.wire import Frames, decode, encode
from scripts.simulated_links import DOWN, UP, Cable, Direction
from scripts.simulated_nodes import SimulatedNode

START_SECONDS = 600.0  # within which the first nodes are ready


@dataclass(frozen=True)
class Mac:
    """One node: its speed, its cable, and when it comes and goes.

    `spread`: of the time of a leaf around its mean, as a share (log-normal). `slow`: (from, to, factor), a time in
    which a leaf takes `factor` times as long. Times are seconds after the first step's begin.
    """

    name: str
    tokens_per_second: float
    bytes_per_second: float = math.inf
    joins: float | None = None  # None: it is there from the start
    lost: float | None = None
    spread: float = 0.0
    slow: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class Office:
    """The cluster to simulate: its Macs, the coordinator's cable, the vector's bytes, and how it is assigned.

    `frames`: bytes on a cable for each byte of a message. `delay`: seconds of a message on its way. `elements`: of the
    vectors that are really sent; each byte of theirs stands for so many as make `vector_bytes`.
    """

    macs: tuple[Mac, ...]
    vector_bytes: int
    bytes_per_second: float = math.inf
    frames: float = 1.0
    delay: float = 0.0
    elements: int = 1
    one_by_one: bool = False  # the coordinator gets every message alone, as when it is never behind
    timing: TimingConfig = field(default_factory=TimingConfig)
    assigner: Assigner = assign
    uneven: float = 0.0  # of the shares of the coordinator's cable, see simulated_links.py
    seed: int = 0


@dataclass(frozen=True)
class StepResult:
    """A step in virtual time: its seconds, the bytes of its messages in each direction, its partials, its nodes."""

    seconds: float
    bytes_up: int
    bytes_down: int
    partials: int
    nodes: int


@dataclass(frozen=True)
class _Due:
    """An event: a message arrives on one side, a result is there, a heartbeat is due, a node comes or goes."""

    kind: Literal["up", "down", "result", "beat", "join", "lose"]
    name: str
    parcel: Parcel | None = None
    result: Result | None = None
    worker: bytes = b""


class SimulatedCluster:
    """The coordinator of an office and its nodes. It is the hub of the fleet, and its clock."""

    def __init__(self, office: Office) -> None:
        self.office, self.now = office, 0.0
        self.bytes = {UP: 0, DOWN: 0}
        self.nodes: dict[str, SimulatedNode] = {}
        self._random = np.random.default_rng(office.seed)
        self._cables = {
            way: Direction(office.bytes_per_second, uneven=office.uneven, random=self._random) for way in (UP, DOWN)
        }
        self._due: list[tuple[float, int, _Due]] = []
        self._number = count()
        self._inbox: list[Parcel] = []
        self._partial = np.zeros(office.elements, np.float32)
        self._began, self._woken = 0.0, False
        versions = {name: version(name) for name in ("mlx", "mlx-lm")}
        spec = run_spec(RunConfig(model="none", output=Path(), data=DataConfig(path="none")))
        settings = ClusterSettings("simulated", 1, spec, versions, 1, timing=office.timing)
        self.cluster = Cluster(settings, office.assigner)
        self.fleet = Fleet(self.cluster, self, clock=self.clock, wall=self.clock, threaded=False)
        for mac in office.macs:
            if mac.joins is None:
                self._join(mac, versions)
        first = len(self.nodes)
        self.fleet.wait_for_nodes(first, first, START_SECONDS)
        self._began = self.now
        for mac in office.macs:
            if mac.joins is not None:
                self._later(mac.joins, _Due("join", mac.name))
            if mac.lost is not None:
                self._later(mac.lost, _Due("lose", mac.name))

    def clock(self) -> float:
        """The virtual time in seconds."""
        return self.now

    def step(self, number: int, leaves: Iterable[Leaf], adapter: Vector | None = None) -> StepResult:
        """Takes one step, as the training loop does: the adapter down, the leaves, the partials up and summed."""
        began, before = self.now, dict(self.bytes)
        self.fleet.send_adapter(number, np.zeros(self.office.elements, np.float32) if adapter is None else adapter)
        self.gradient, _ = self.fleet.gradient(Request("gradient", number + 1, number, tuple(leaves)))
        self.fleet.node_work(began)
        round_ = self.cluster.round
        assert round_ is not None
        moved = {way: self.bytes[way] - before[way] for way in before}
        nodes = len(set(round_.computed_by.values()))
        return StepResult(self.now - began, moved[UP], moved[DOWN], len(round_.senders), nodes)

    # ---- the hub

    def receive(self, timeout: float) -> list[Parcel]:
        """Lets time pass until a message arrives, or for a part of a heartbeat's time; none when it was woken up."""
        until = self.now + self.office.timing.beat_seconds / 4
        woken, self._woken = self._woken, False
        while not self._inbox and not woken:
            ends = [cables.next_end() for cables in self._cables.values()]
            then = min([*ends, until, *(time for time, *_ in self._due[:1])])
            self.now = max(then, self.now)
            for way, cables in self._cables.items():
                for name, parcel in cables.take(self.now):
                    assert isinstance(parcel, Parcel)
                    self._later(self.office.delay, _Due("up" if way == UP else "down", name, parcel))
            while self._due and self._due[0][0] <= self.now:
                self._happen(heapq.heappop(self._due)[2])
            if self.now >= until:
                break
        take = 1 if self.office.one_by_one else len(self._inbox)
        arrived, self._inbox = self._inbox[:take], self._inbox[take:]
        return arrived

    def send(self, parcel: Parcel) -> bool:
        """Puts a message on a node's cable. One to a node that is gone is lost without a sign, as without power."""
        self._travel(parcel.peer.decode().partition("#")[0], DOWN, parcel)
        return True

    def admitted(self, waiting: int) -> None:
        """No connection waits."""

    def take_refusals(self) -> list[Refusal]:
        """No connection is refused."""
        return []

    def wake(self) -> None:
        """Ends the next `receive` at once: the coordinator has something to send."""
        self._woken = True

    def close(self) -> None:
        """Nothing is open."""

    # ---- what happens

    def _join(self, mac: Mac, versions: dict[str, str]) -> None:
        for way in self._cables.values():
            way.cables[mac.name] = Cable(mac.bytes_per_second)

        def leaf_seconds(tokens: int) -> float:
            return self._leaf_seconds(mac, tokens)

        self.nodes[mac.name] = node = SimulatedNode(mac.name, versions, leaf_seconds, self._partial)
        node.register()
        self._flush(node)
        self._later(self.office.timing.beat_seconds, _Due("beat", mac.name))

    def _leaf_seconds(self, mac: Mac, tokens: int) -> float:
        usual = tokens / mac.tokens_per_second
        if mac.spread:
            usual *= float(np.exp(mac.spread * self._random.standard_normal()))
        if mac.slow and mac.slow[0] <= self.now - self._began < mac.slow[1]:
            usual *= mac.slow[2]
        return usual

    def _happen(self, due: _Due) -> None:
        if due.kind == "join":
            mac = next(mac for mac in self.office.macs if mac.name == due.name)
            self._join(mac, dict(self.cluster.settings.versions))
            return
        node = self.nodes[due.name]
        if not node.there:
            return
        match due:
            case _Due(kind="lose"):
                node.there = False
                for cables in self._cables.values():
                    cables.cut(self.now, due.name)
            case _Due(kind="up", parcel=Parcel() as parcel):
                self._inbox.append(parcel)
            case _Due(kind="down", parcel=Parcel() as parcel):
                node.hear(parcel.channel, parcel.peer, parcel.frames)
            case _Due(kind="beat"):
                node.beat()
                self._later(self.office.timing.beat_seconds, _Due("beat", due.name))
            case _Due(kind="result", result=result) if result is not None and due.worker == node.data:
                node.deliver(result)
                self._go_on(node)
        self._flush(node)

    def _flush(self, node: SimulatedNode) -> None:
        """Sends what a node has to say, and has it begin what waits."""
        while node.waits_for_work:
            node.begin()
            self._go_on(node)
        for channel, peer, message, payload in node.said():
            self._travel(node.name, UP, Parcel(channel, peer, encode(message, payload)))

    def _go_on(self, node: SimulatedNode) -> None:
        if (found := node.next_result()) is not None:
            seconds, result = found
            self._later(seconds, _Due("result", node.name, result=result, worker=node.data))

    def _travel(self, name: str, way: str, parcel: Parcel) -> None:
        size, bulk = self._size(parcel)
        self.bytes[way] += size
        if bulk and self.nodes[name].there:
            self._cables[way].send(self.now, name, size * self.office.frames, parcel)
        else:
            self._later(self.office.delay, _Due("up" if way == UP else "down", name, parcel))

    def _size(self, parcel: Parcel) -> tuple[int, bool]:
        """Returns the bytes of a message, and true for one of a vector, behind which the next ones wait."""
        size = sum(memoryview(frame).nbytes for frame in parcel.frames)
        if parcel.channel != DATA:
            return size, False
        message = decode(parcel.frames)[0]
        if not isinstance(message, m.VectorBlock):
            return size, isinstance(message, m.VectorEnd)
        return stands_for(parcel.frames, self.office), True

    def _later(self, seconds: float, due: _Due) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._number), due))


def stands_for(frames: Frames, office: Office) -> int:
    """Returns the bytes that the frames of a vector's block stand for, with the heads of the blocks that it replaces."""
    *heads, payload = (memoryview(frame).nbytes for frame in frames)
    true_payload = round(payload * office.vector_bytes / (4 * office.elements))
    blocks = -(-true_payload // BLOCK_BYTES) / -(-office.elements // BLOCK_ELEMENTS)
    return true_payload + round(sum(heads) * max(blocks, 1))


def equal_leaves(number: int, tokens: int) -> list[Leaf]:
    """Returns leaves of one row of `tokens` tokens each."""
    row = Row(0, np.ones(tokens, np.int32), np.array([0] + [1] * (tokens - 1), np.uint8))
    return [Leaf(index, (row,)) for index in range(number)]


def usual_step(office: Office, leaves: int, tokens: int, warm: int = 3) -> StepResult:
    """Returns the step after `warm` others, when the speeds of the nodes and their links are known."""
    cluster, asked = SimulatedCluster(office), equal_leaves(leaves, tokens)
    return [cluster.step(number, asked) for number in range(warm + 1)][-1]


def with_nodes(office: Office, count: int) -> Office:
    """Returns the same office with its first `count` Macs."""
    return replace(office, macs=office.macs[:count])
