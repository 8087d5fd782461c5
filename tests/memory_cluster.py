"""A cluster in one thread: the coordinator's fleet, and wires to the nodes of tests/memory_nodes.py.

Messages move and results are computed when a test says so; in a `RunningCluster`, whenever the coordinator waits.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from mlxdist.coordinator.cluster.audit import Audit
from mlxdist.coordinator.cluster.cluster import Cluster
from mlxdist.coordinator.cluster.events import NodeNews
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.fleet.model_source import ModelSource
from mlxdist.coordinator.schedule.assign import NodeSeconds
from mlxdist.node.link.jobs import Result
from mlxdist.protocol import messages as m
from mlxdist.protocol.transport import Parcel, Refusal, is_probe
from mlxdist.protocol.tree import Span, TreeSum
from mlxdist.protocol.vectors import Vector
from mlxdist.protocol.wire import Frames, decode
from tests.coordinator.cluster.scripted_node import give_back
from tests.memory_nodes import MemoryNode, Performer, Wire

Move = tuple[str, Callable[[], object]]  # something that may happen next, and of what kind it is


class MemoryCluster:
    """A coordinator's cluster and fleet, the wires to it, and its nodes. It is the hub of the fleet."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.wires: dict[tuple[str, bytes], Wire] = {}
        self.nodes: dict[str, MemoryNode] = {}
        self.inbox: list[Parcel] = []  # has arrived at the coordinator
        self.damage_up = self.damage_down = 0  # blocks that are to lose a bit on their way

    def coordinate(
        self,
        cluster: Cluster,
        on_news: Callable[[NodeNews], None] = lambda news: None,
        audit: Audit | None = None,
        model: ModelSource | None = None,
    ) -> None:
        """From now on this is the coordinator."""

        def clock() -> float:
            return self.now

        self.cluster = cluster
        self.fleet = Fleet(
            cluster, self, on_news=on_news, clock=clock, wall=clock, audit=audit, model=model, threaded=False
        )

    def join(self, engine: Performer, name: str = "", host: Mapping[str, str] | None = None) -> MemoryNode:
        """A new node, which registers."""
        node = MemoryNode(name or f"node-{len(self.nodes)}", self, engine, host or {})
        self.nodes[node.name] = node
        return node

    # ---- the hub

    def connect(self, channel: str, peer: bytes, hear: Callable[[Frames], None] | None = None) -> Wire:
        """A new connection; one of the same name is replaced."""
        self.wires.pop((channel, peer), None)
        wire = self.wires[channel, peer] = Wire(channel, peer, hear)
        return wire

    def receive(self, timeout: float) -> list[Parcel]:
        """The parcels that have arrived; never waits."""
        arrived, self.inbox = self.inbox, []
        return arrived

    def admitted(self, waiting: int) -> None:
        """No connection waits."""

    def take_refusals(self) -> list[Refusal]:
        """No connection is refused."""
        return []

    def send(self, parcel: Parcel) -> bool:
        """Onto the peer's wire, when it is connected."""
        wire = self.wires.get((parcel.channel, parcel.peer))
        if wire is None or not wire.open:
            return False
        wire.down.append([bytes(frame) for frame in parcel.frames])
        return True

    def wake(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is open."""

    # ---- moves

    def pump(self) -> None:
        """The coordinator's thread goes round once."""
        self.fleet._pump(0.0)

    def deliver_up(self, wire: Wire) -> None:
        """One message reaches the coordinator."""
        frames, self.damage_up = _perhaps_damaged(wire.up.popleft(), self.damage_up)
        self.post(wire.channel, wire.peer, frames)

    def post(self, channel: str, peer: bytes, frames: Frames) -> None:
        """A message of any peer has arrived."""
        self.inbox.append(Parcel(channel, peer, frames))

    def deliver_down(self, wire: Wire) -> None:
        """One message reaches the node."""
        frames, self.damage_down = _perhaps_damaged(wire.down.popleft(), self.damage_down)
        (wire.hear or wire.inbox.append)(frames)


class SummingCluster(MemoryCluster):
    """A cluster with a loop that sums one partial at a time; what is summed away is given back once per fetch."""

    def __init__(self, now: float = 0.0) -> None:
        super().__init__(now)
        self.total: TreeSum[Vector] | None = None
        self.fetched: list[tuple[Span, Vector]] = []
        self.freed: list[Vector] = []

    def add(self, left: Vector, right: Vector) -> Vector:
        """The sum, in the buffer of `left`."""
        self.freed.append(right)
        return np.add(left, right, out=left)

    def loop(self) -> Callable[[], None] | None:
        """The next move of the loop, if any."""
        if self.fetched:
            return self.sum_one
        if self.cluster.round is not None and self.cluster.round.partials:
            return lambda: self.fetched.extend(self.cluster.fetch_partials())
        return None

    def sum_one(self) -> None:
        """Adds the next partial."""
        assert self.total is not None
        self.total.put(*self.fetched.pop(0))
        if not self.fetched:
            give_back(self.cluster, self.freed)
            self.freed = []
            self.pump()


class RunningCluster(MemoryCluster):
    """A cluster in which everything moves whenever the coordinator waits: all messages, and one result of each node."""

    def receive(self, timeout: float) -> list[Parcel]:
        """Lets the nodes work, then takes what they sent."""
        for wire in list(self.wires.values()):
            while wire.down:
                self.deliver_down(wire)
        for node in self.nodes.values():
            if node.can_work:
                self.came(node, node.step())
        for wire in list(self.wires.values()):
            while wire.up:
                self.deliver_up(wire)
        return super().receive(timeout)

    def came(self, node: MemoryNode, result: Result | None) -> None:
        """A node has done a step; this is the result of it."""

    def settle(self) -> None:
        """Goes on until nothing is under way and no node has work."""
        while any(wire.up or wire.down for wire in self.wires.values()) or any(
            node.can_work for node in self.nodes.values()
        ):
            self.pump()


def split_at(cuts: Sequence[int], seconds: Mapping[str, NodeSeconds]) -> dict[str, Span]:
    """The leaves of a step split at these places, worse than any good assignment: many subtrees, nodes without work."""
    total = len(next(iter(seconds.values())).leaves)
    edges = [0, *sorted(min(cut, total) for cut in cuts[: len(seconds) - 1]), total]
    runs = (Span(start, stop) for start, stop in pairwise(edges))
    return {name: run for name, run in zip(seconds, runs, strict=False) if len(run)}


def _perhaps_damaged(frames: Frames, damage: int) -> tuple[Frames, int]:
    """The frames, with one bit changed if this is a block to damage, and how many blocks are left to damage."""
    if not damage or is_probe(frames) or not isinstance(decode(frames)[0], m.VectorBlock | m.FileBlock):
        return frames, damage
    *head, payload = frames
    return [*head, bytes([*payload[:2], payload[2] ^ 0x40, *payload[3:]])], damage - 1
