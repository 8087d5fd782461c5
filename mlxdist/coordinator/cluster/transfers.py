"""Vectors under way: partials up, adapters down; which may travel now, how long each took, what arrived damaged.

up:    VectorOffer -> Credit -> VectorBlock ... VectorEnd -> Received          down: the same, the other way round
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from mlxdist.coordinator.cluster.buffers import BufferPool
from mlxdist.coordinator.cluster.downloads import Downloads
from mlxdist.coordinator.cluster.events import Event, NotNeeded, Send, news_of, to_worker
from mlxdist.coordinator.cluster.node import Node
from mlxdist.coordinator.cluster.nonfinite import refuted
from mlxdist.coordinator.cluster.scheduler import Scheduler
from mlxdist.coordinator.cluster.timeline import Mark
from mlxdist.coordinator.cluster.uploads import DamagedError, Uploads
from mlxdist.coordinator.schedule.node_speeds import TransferTimes
from mlxdist.coordinator.schedule.rounds import Round
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import MismatchError, StaleError, WireError
from mlxdist.protocol.tree import Span
from mlxdist.protocol.vectors import block_count

LEAST_SECONDS = 1e-6  # of a partial on its way
QUIET_SECONDS, QUIET_BLOCKS = 0.25, 3.0  # since the last block of a vector, or blocks' times, until none travels
MOST_DAMAGED = 2  # vectors in a row that came with another hash; after that the worker is restarted


@dataclass
class Transfers:
    """All vectors between the coordinator and its nodes."""

    pool: BufferPool = field(default_factory=BufferPool)
    times: TransferTimes = field(default_factory=TransferTimes)
    uploads: Uploads = field(init=False)
    downloads: Downloads = field(init=False)
    moved: float = -math.inf  # when the last block of a vector was sent, or came, or all of one was there

    def __post_init__(self) -> None:
        self.uploads, self.downloads = Uploads(self.pool), Downloads(self.times)

    # ---- up

    def offered(self, node: Node, offer: m.VectorOffer, round_: Round, elements: int, now: float) -> list[Event]:
        """Takes the offer of a partial of `elements` float32; it is let in when there is room.

        Raises StaleError for a partial that is not missing, MismatchError for one of another size.
        """
        span = Span(offer.start, offer.stop)
        assignment = round_.check(node.name, offer.step, offer.attempt, offer.adapter_version, span)
        if offer.kind != "partial" or (offer.elements, offer.slice_start, offer.slice_stop) != (elements, 0, elements):
            raise MismatchError(f"{node.name} offers a vector that is not of this run's manifest ({elements} elements)")
        if span not in assignment.missing:
            raise StaleError(f"the partial over {span} is not missing")
        self.uploads.offer(node.name, offer)
        self.times.begin("offer", node.name, offer.stream, now)
        return []

    def block(self, node: Node, message: m.VectorBlock, payload: memoryview, now: float) -> list[Event]:
        """Takes one block of a partial, and gives the next credit."""
        self.moved = now
        upto = self.uploads.block(node.name, message.stream, message.index, payload)
        return [to_worker(node, m.Credit(node.session, message.stream, upto))]

    def ended(
        self, node: Node, message: m.VectorEnd, scheduler: Scheduler, nodes: Mapping[str, Node], now: float
    ) -> list[Event]:
        """Takes the end of a partial: into the round when it is whole and finite; a damaged one is sent again.

        Raises StaleError for one that is not needed any more, WireError for one before the answers to its leaves, and
        when too many of the worker's were damaged.
        """
        try:
            offer, vector, finite = self.uploads.end(node.name, message.stream, message.digest)
        except DamagedError as error:
            self._count_damage(node)
            again = to_worker(node, m.Received(node.session, message.stream, whole=False))
            return [news_of(node, str(error), "sent again"), again]
        node.worker.damaged = 0
        since_credit = self.times.end("up", node.name, message.stream, now)[0]
        since_offer = self.times.end("offer", node.name, message.stream, now)[0]
        if message.grew:  # what left while its last leaf still computed costs the step nothing
            since_credit = max(min(since_credit, since_offer - message.grew), LEAST_SECONDS)
        node.speed.sent_up(since_credit)
        sent = now - since_credit
        marks = [Mark(node.name, "up", sent, now, Span(offer.start, offer.stop))]
        if now - since_offer < sent:
            marks.insert(0, Mark(node.name, "room", now - since_offer, sent, marks[0].span))
        current, span = scheduler.current(), Span(offer.start, offer.stop)
        if not finite and current.misses(offer.attempt, span):
            self.pool.give_back(vector)
            return scheduler.nonfinite(current.assignments[offer.attempt], span, nodes, said=False)
        try:
            done = current.partial(offer.attempt, span, vector)
        except (StaleError, WireError):
            self.pool.give_back(vector)
            raise
        node.silences = 0
        received = to_worker(node, m.Received(node.session, message.stream, whole=True))
        return [*marks, received, *map(NotNeeded, done), *refuted(current, span, node.name, nodes)]

    def leaf_answered(self, node: Node, leaf: int, now: float) -> None:
        """Times the partials that end with this leaf from now on: until now they waited for it."""
        for stream in self.uploads.arriving(node.name, leaf + 1):
            self.times.begin("up", node.name, stream, now)

    def stop_unneeded(self, round_: Round, nodes: Mapping[str, Node], now: float) -> list[Event]:
        """Throws away partials that another node has brought, and tells their senders."""
        events: list[Event] = []
        unneeded = self.uploads.not_needed(lambda offer: round_.misses(offer.attempt, Span(offer.start, offer.stop)))
        for name, stream in unneeded:
            for kind in ("up", "offer"):
                self.times.end(kind, name, stream, now)
            events.append(to_worker(nodes[name], m.Stale(nodes[name].session, "another node was faster", stream)))
        return events

    def admit(self, round_: Round, nodes: Mapping[str, Node], now: float) -> list[Event]:
        """Lets in the partials that there is room for."""
        events: list[Event] = []
        if not self.uploads.waits:
            return events
        for name, stream, upto in self.uploads.admit(round_.lowest_missing):
            self.times.begin("up", name, stream, now)
            events.append(to_worker(nodes[name], m.Credit(nodes[name].session, stream, upto)))
        return events

    # ---- down

    def received(self, node: Node, message: m.Received, now: float) -> list[Event]:
        """Notes that a worker has an adapter, or sends a damaged one again. Raises WireError when too many were."""
        seconds, version = self.times.end("down", node.name, message.stream, now)
        self.moved = now
        worker = node.worker
        if message.whole:
            node.silences = 0
            node.speed.sent_down(seconds)
            worker.damaged = 0
            worker.adapter_here = max(worker.adapter_here, version)
            return [Mark(node.name, "down", now - seconds, now)]
        if not worker.has_reference and worker.adapter_version < 0:
            raise WireError("no adapter was sent to it")
        self._count_damage(node)
        worker.adapter_version, worker.has_reference = -1, False
        again = self.downloads.adapters_to(node, now)
        return [news_of(node, "an adapter arrived damaged there", "sent again"), *again]

    # ---- both

    def blocks_down(self, nodes: Mapping[str, Node], now: float) -> Iterator[Send]:
        """Yields the blocks of vectors that may go to nodes now."""
        for send in self.downloads.blocks(nodes):
            self.moved = now
            yield send

    def quiet(self, nodes: Iterable[Node], elements: int, now: float) -> bool:
        """Returns True when no vector travels, as far as one can see: none is on its way to a node, and none comes.

        On a slow link the blocks of one come rarely, so the wait for another one grows with the measured seconds of
        vectors of so many elements.
        """
        slowest = max((max(node.speed.up, node.speed.down) for node in nodes), default=0.0)
        one = slowest / max(block_count(elements), 1)
        return not self.times.any_down and now - self.moved > max(QUIET_SECONDS, QUIET_BLOCKS * one)

    def drop(self, name: str) -> None:
        """Forgets what is under way to and from a node whose worker is gone."""
        self.downloads.drop(name)
        self.uploads.drop(name)
        self.times.drop(name)

    def _count_damage(self, node: Node) -> None:
        node.worker.damaged += 1
        if node.worker.damaged > MOST_DAMAGED:
            raise WireError(f"{node.worker.damaged} vectors in a row arrived damaged")
