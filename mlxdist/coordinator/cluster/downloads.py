"""What goes down to the workers: the adapter, the reference's adapter, and tasks with their rows. Messages, no socket.

VectorOffer, then VectorBlock by credit, then VectorEnd        Assignment, LeafRows for each of its leaves
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mlxdist.coordinator.cluster.node import Node
from mlxdist.coordinator.schedule.node_speeds import Transfers
from mlxdist.coordinator.schedule.rounds import Assignment, Request
from mlxdist.protocol import messages as m
from mlxdist.protocol.leaves import pack_leaf
from mlxdist.protocol.transport import DATA
from mlxdist.protocol.vectors import OutgoingVector, Vector, digest
from mlxdist.protocol.wire import Buffer

Send = Callable[[str, bytes, m.Message, Buffer], None]


@dataclass
class Downloads:
    """The vectors to send, and those under way by node and stream. A node's own record says what it has."""

    send: Send
    transfers: Transfers
    adapter: tuple[int, Vector, str] | None = None  # version, values, digest
    reference: tuple[Vector, str] | None = None
    _under_way: dict[tuple[str, int], OutgoingVector] = field(default_factory=dict)
    _streams: int = 0

    def set_adapter(self, version: int, vector: Vector) -> None:
        """The adapter that is sent from now on. `vector` must not change afterwards."""
        self.adapter = (version, vector, digest(vector))

    def set_reference(self, vector: Vector) -> None:
        """The reference's adapter. `vector` must not change afterwards."""
        self.reference = (vector, digest(vector))

    def adapters_to(self, node: Node, now: float) -> None:
        """Start what the worker does not have of both on its way: the reference first, for its first work needs it."""
        self.reference_to(node, now)
        if self.adapter is not None:
            version, vector, hashed = self.adapter
            if node.adapter_version != version:
                node.adapter_version = version
                self._offer(node, "adapter", version, vector, hashed, now)

    def reference_to(self, node: Node, now: float) -> None:
        """Start the reference's adapter on its way, once per worker."""
        if self.reference is not None and not node.has_reference:
            node.has_reference = True
            self._offer(node, "reference", 0, *self.reference, now)

    def work_to(self, node: Node, request: Request, assignment: Assignment, now: float) -> None:
        """Send a task with its rows, behind the adapters that it needs."""
        assert node.data is not None
        self.adapters_to(node, now)
        span = assignment.span
        task = m.Assignment(
            session=node.session,
            verb=request.verb,
            step=request.step,
            attempt=assignment.attempt,
            adapter_version=request.adapter_version,
            start=span.start,
            stop=span.stop,
            total=len(request.leaves),
            loss=request.loss,
            parameters=request.parameters,
            scalars=dict(request.scalars),
        )
        self.send(DATA, node.data, task, b"")
        for leaf in request.leaves[span.start : span.stop]:
            rows = m.LeafRows(
                session=node.session,
                step=request.step,
                attempt=assignment.attempt,
                leaf=leaf.index,
                widths=leaf.widths,
                row_ids=tuple(row.row_id for row in leaf.rows),
                lengths=tuple(len(row.ids) for row in leaf.rows),
                row_inputs=dict(request.row_inputs.get(leaf.index, {})),
            )
            self.send(DATA, node.data, rows, pack_leaf(leaf))

    def credit(self, name: str, stream: int, upto: int) -> None:
        """The worker takes blocks up to this one."""
        if vector := self._under_way.get((name, stream)):
            vector.credit(upto)

    def send_blocks(self, nodes: Mapping[str, Node]) -> None:
        """Send the blocks that have credit."""
        for (name, stream), vector in list(self._under_way.items()):
            node = nodes[name]
            assert node.data is not None
            for index, block in vector.blocks():
                self.send(DATA, node.data, m.VectorBlock(node.session, stream, index), block)
            if vector.all_sent:
                del self._under_way[name, stream]
                self.send(DATA, node.data, m.VectorEnd(node.session, stream, vector.end()), b"")

    def drop(self, name: str) -> None:
        """The node's worker is gone."""
        self._under_way = {key: vector for key, vector in self._under_way.items() if key[0] != name}

    def _offer(self, node: Node, kind: str, version: int, vector: Vector, hashed: str, now: float) -> None:
        assert node.data is not None
        self._streams += 1
        self._under_way[node.name, self._streams] = OutgoingVector(self._streams, vector, hashed)
        self.transfers.begin("down", node.name, self._streams, now, version if kind == "adapter" else -1)
        offer = m.VectorOffer(node.session, self._streams, kind, version, len(vector), slice_stop=len(vector))
        self.send(DATA, node.data, offer, b"")
