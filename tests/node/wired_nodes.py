"""Real sessions and engines wired to a real cluster, without threads: messages move when a test, or a result, says so.

A partial that grows moves messages each time it grows, so that what leaves in the middle of a backward is seen there.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from mlxdist.coordinator.cluster.cluster import Cluster
from mlxdist.coordinator.cluster.settings import ClusterSettings
from mlxdist.coordinator.config.run_spec import run_spec
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.schedule.rounds import Request
from mlxdist.node.link.jobs import Partial
from mlxdist.node.link.session import Session
from mlxdist.node.work.engine import Engine, versions
from mlxdist.protocol import messages as m
from mlxdist.protocol.transport import CONTROL, DATA, Parcel
from mlxdist.protocol.tree import TreeSum
from mlxdist.protocol.vectors import Vector
from mlxdist.protocol.wire import Frames, decode, encode
from tests.coordinator.cluster.scripted_node import give_back


def cluster_for(config: RunConfig, **changes: Any) -> Cluster:
    """A cluster for this run, with the default timing."""
    values = {
        "run": "run",
        "incarnation": 5,
        "spec": run_spec(config),
        "versions": versions(),
        "data_port": 7001,
    }
    return Cluster(ClusterSettings(**{**values, **changes}))


@dataclass
class WiredNode:
    """One worker."""

    wires: "Wires"
    name: str
    engine: Engine
    session: Session

    def work(self) -> bool:
        """Does the next job. Returns False when there is none."""
        if not self.session.jobs:
            return False
        with closing(self.engine.perform(self.session.next_job(), self.session.id, lambda sentence: None)) as results:
            for result in results:
                needed = self.session.deliver(result)
                if isinstance(result, Partial) and result.ready is not None:
                    if result.ready:
                        self.wires.record.append(("grown", result.ready))
                    self.wires.pump()
                    if result.ready:
                        self.wires.on_growth(self.name)
                    needed = self.session.needed(result.assignment.attempt)
                if not needed:
                    break
        self.session.done()
        self.wires.pump()
        return True


@dataclass
class Wires:
    """The cluster and its nodes; `record` is what left, by kind and index, and what has grown."""

    cluster: Cluster
    now: float = 100.0
    nodes: dict[str, WiredNode] = field(default_factory=dict)
    record: list[tuple[str, int]] = field(default_factory=list)
    on_growth: Callable[[str], None] = lambda name: None
    damage: Callable[[m.Message, Frames], Frames] = lambda message, frames: frames  # on the way up

    def join(self, name: str, engine: Engine) -> WiredNode:
        """A node that gets ready."""
        enlist = m.Register(m.PROTOCOL_VERSION, name, 0, {})
        self.cluster.receive(Parcel(CONTROL, name.encode(), encode(enlist)), self.now)
        session = self.cluster.nodes[name].session
        node = self.nodes[name] = WiredNode(self, name, engine, Session(name, session))
        node.session.say(m.Hello(session, versions()))
        self.settle()
        return node

    def pump(self) -> None:
        """Move messages until there are none; nothing is computed."""
        moved = True
        while moved:
            moved = False
            for name, node in self.nodes.items():
                for message, payload in node.session.take_outgoing():
                    moved = True
                    self.record.append((type(message).__name__, getattr(message, "index", -1)))
                    frames = self.damage(message, [bytes(frame) for frame in encode(message, payload)])
                    self.cluster.receive(Parcel(DATA, name.encode(), frames), self.now)
            for parcel in self.cluster.take_outgoing():
                if parcel.channel == DATA:
                    moved = True
                    self.nodes[parcel.peer.decode()].session.handle(*decode([bytes(one) for one in parcel.frames]))

    def settle(self) -> None:
        """Move and compute until nothing is left to do."""
        self.pump()
        while any([node.work() for node in self.nodes.values()]):
            pass

    def beat(self) -> None:
        """Every supervisor is there."""
        for name in self.nodes:
            beat = encode(m.Heartbeat(self.cluster.nodes[name].session, 1))
            self.cluster.receive(Parcel(CONTROL, name.encode(), beat), self.now)

    def gradient(self, request: Request) -> Vector:
        """The sum over a request's leaves."""
        total: TreeSum[Vector] = TreeSum(len(request.leaves), lambda left, right: left + right)
        self.cluster.begin(request)
        self.settle()
        assert self.cluster.failure is None
        assert self.cluster.round is not None
        assert self.cluster.round.complete
        for span, vector in self.cluster.fetch_partials():
            total.put(span, vector.copy())
            give_back(self.cluster, [vector])
        assert total.done
        return total.result
