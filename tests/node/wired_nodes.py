"""Real engines at wires, with a record of what leaves them in the middle of a backward."""

from collections.abc import Callable

from mlxdist.coordinator.config.run_spec import run_spec
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.schedule.rounds import Request
from mlxdist.node.link.jobs import Partial, Result
from mlxdist.protocol import messages as m
from mlxdist.protocol.transport import CONTROL, Parcel
from mlxdist.protocol.vectors import Vector
from mlxdist.protocol.wire import Frames, decode, encode
from tests.coordinator.cluster.scripted_node import new_cluster
from tests.memory_cluster import RunningCluster
from tests.memory_nodes import MemoryNode


class Wires(RunningCluster):
    """A cluster for this run; `record` is what left the nodes, by kind and index, and what has grown."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(now=100.0)
        self.coordinate(new_cluster(spec=run_spec(config)))
        self.record: list[tuple[str, int]] = []
        self.on_growth: Callable[[str], None] = lambda name: None

    def post(self, channel: str, peer: bytes, frames: Frames) -> None:
        """A message that has left is recorded."""
        message, _ = decode(frames)
        self.record.append((type(message).__name__, getattr(message, "index", -1)))
        super().post(channel, peer, frames)

    def came(self, node: MemoryNode, result: Result | None) -> None:
        """So is a partial that has grown."""
        if isinstance(result, Partial) and result.ready:
            self.record.append(("grown", result.ready))
            self.on_growth(node.name)

    def beat(self) -> None:
        """Every supervisor is there."""
        for node in self.nodes.values():
            assert node.session is not None
            beat = encode(m.Heartbeat(node.session.id, 1))
            self.cluster.receive(Parcel(CONTROL, node.control.peer, beat), self.now)

    def gradient(self, request: Request) -> Vector:
        """The sum over a request's leaves."""
        gradient = self.fleet.gradient(request)[0].copy()
        self.cluster.transfers.pool.end_loan()
        self.settle()
        return gradient
