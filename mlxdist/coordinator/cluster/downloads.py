"""Downloads to the workers: the adapter, the reference's adapter, and assignments with their rows. No socket.

VectorOffer, then VectorBlock by credit, then VectorEnd        Assignment, LeafRows for each of its leaves
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mlxdist.coordinator.cluster.events import Send, to_worker
from mlxdist.coordinator.cluster.node import Node
from mlxdist.coordinator.schedule.assignments import Assignment
from mlxdist.coordinator.schedule.node_speeds import TransferTimes
from mlxdist.coordinator.schedule.rounds import Request
from mlxdist.protocol import messages as m
from mlxdist.protocol.leaves import pack_leaf
from mlxdist.protocol.vectors import OutgoingVector, Vector, VectorHash, block_count


@dataclass
class Downloads:
    """The vectors to send, and those under way by node and stream. A node's worker says what it has."""

    times: TransferTimes
    adapter: tuple[int, VectorHash] | None = None  # version, and the values with their hash
    reference: VectorHash | None = None
    _under_way: dict[tuple[str, int], OutgoingVector] = field(default_factory=dict)
    _credited: dict[tuple[str, int], None] = field(default_factory=dict)  # since blocks were sent last
    _streams: int = 0

    def set_adapter(self, version: int, vector: Vector) -> None:
        """Sets the adapter that is sent from now on. `vector` must not change afterwards."""
        self.adapter = (version, VectorHash(vector))

    def set_reference(self, vector: Vector) -> None:
        """Sets the reference's adapter. `vector` must not change afterwards."""
        self.reference = VectorHash(vector)

    def adapters_to(self, node: Node, now: float) -> list[Send]:
        """Offers both adapters, as far as the worker does not have them: the reference first, for all work needs it."""
        offers = self.reference_to(node, now)
        if self.adapter is not None:
            version, hashed = self.adapter
            if node.worker.adapter_version != version:
                node.worker.adapter_version = version
                offers.append(self._offer(node, "adapter", version, hashed, now))
        return offers

    def reference_to(self, node: Node, now: float) -> list[Send]:
        """Offers the reference's adapter, once per worker."""
        if self.reference is None or node.worker.has_reference:
            return []
        node.worker.has_reference = True
        return [self._offer(node, "reference", 0, self.reference, now)]

    def assignment_to(self, node: Node, request: Request, assignment: Assignment, now: float) -> list[Send]:
        """Sends an assignment with its rows, behind the adapters that it needs."""
        span = assignment.span
        message = m.Assignment(
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
        sends = [*self.adapters_to(node, now), to_worker(node, message)]
        for leaf in request.leaves[span.start : span.stop]:
            rows = m.LeafRows(
                session=node.session,
                step=request.step,
                attempt=assignment.attempt,
                leaf=leaf.index,
                branches=leaf.branches,
                row_ids=tuple(row.row_id for row in leaf.rows),
                lengths=tuple(len(row.ids) for row in leaf.rows),
                row_inputs=dict(request.row_inputs.get(leaf.index, {})),
            )
            sends.append(to_worker(node, rows, pack_leaf(leaf)))
        return sends

    def is_new(self, name: str, stream: int, upto: int) -> bool:
        """True if this credit lets in more blocks than those before."""
        vector = self._under_way.get((name, stream))
        return vector is not None and min(upto, block_count(len(vector.vector))) > vector.granted

    def credit(self, name: str, stream: int, upto: int) -> None:
        """Notes that the worker takes blocks up to this one."""
        if vector := self._under_way.get((name, stream)):
            vector.credit(upto)
            self._credited[name, stream] = None

    def blocks(self, nodes: Mapping[str, Node]) -> Iterator[Send]:
        """The blocks that have credit, and the ends of vectors whose blocks are all sent."""
        credited, self._credited = sorted(self._credited, key=lambda key: key[1]), {}
        for name, stream in credited:
            if (vector := self._under_way.get((name, stream))) is None:
                continue
            node = nodes[name]
            for index, block in vector.blocks():
                yield to_worker(node, m.VectorBlock(node.session, stream, index), block)
            if vector.all_sent:
                del self._under_way[name, stream]
                yield to_worker(node, m.VectorEnd(node.session, stream, vector.end()))

    def drop(self, name: str) -> None:
        """Forgets what is under way to a node whose worker is gone."""
        self._under_way = {key: vector for key, vector in self._under_way.items() if key[0] != name}

    def _offer(self, node: Node, kind: str, version: int, hashed: VectorHash, now: float) -> Send:
        self._streams += 1
        vector = hashed.vector
        self._under_way[node.name, self._streams] = OutgoingVector(self._streams, vector, hashed)
        self._credited[node.name, self._streams] = None  # an empty one has its end to send
        self.times.begin("down", node.name, self._streams, now, version if kind == "adapter" else -1)
        offer = m.VectorOffer(node.session, self._streams, kind, version, len(vector), slice_stop=len(vector))
        return to_worker(node, offer)
