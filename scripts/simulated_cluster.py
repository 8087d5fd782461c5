"""A whole cluster in virtual time: the real fleet, cluster, scheduler and sum, between modelled nodes and links.

The hub is where time passes: whenever the coordinator waits for messages, the clock goes on to the next event. So the
coordinator itself takes no time, and a simulated hour takes as long as its messages need.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Literal

import numpy as np

from mlxdist.coordinator.cluster.cluster import Cluster
from mlxdist.coordinator.cluster.settings import ClusterSettings
from mlxdist.coordinator.config.run_spec import run_spec
from mlxdist.coordinator.config.schema import DataConfig, RunConfig
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.schedule.rounds import Request
from mlxdist.node.link.jobs import Result
from mlxdist.protocol import messages as m
from mlxdist.protocol.leaves import Leaf
from mlxdist.protocol.transport import DATA, Parcel, Refusal
from mlxdist.protocol.vectors import Vector
from mlxdist.protocol.wire import decode, encode
from scripts.simulated_links import DOWN, UP, Cable, Direction
from scripts.simulated_nodes import SimulatedNode
from scripts.simulated_office import Mac, Office, equal_leaves, stands_for

START_SECONDS = 600.0  # within which the first nodes are ready


@dataclass(frozen=True)
class StepResult:
    """A step in virtual time: its seconds, the bytes of its messages in each direction, its partials, its nodes.

    `summed`: the leaves that are in the sum, as each adds one.
    """

    seconds: float
    bytes_up: int
    bytes_down: int
    partials: int
    nodes: int
    summed: int


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
        self._partials: dict[int, Vector] = {}
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
        return StepResult(self.now - began, moved[UP], moved[DOWN], len(round_.senders), nodes, int(self.gradient[0]))

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

        self.nodes[mac.name] = node = SimulatedNode(
            mac.name, versions, leaf_seconds, self.office.elements, self._partials
        )
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


def usual_step(office: Office, leaves: int, tokens: int, warm: int = 3) -> StepResult:
    """Returns the step after `warm` others, when the speeds of the nodes and their links are known."""
    cluster, asked = SimulatedCluster(office), equal_leaves(leaves, tokens)
    return [cluster.step(number, asked) for number in range(warm + 1)][-1]
