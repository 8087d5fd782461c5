"""The coordinator's half of the protocol: messages in, messages and results out. No socket, no thread, no clock.

    Register -> Accept                 Hello -> Welcome       Loaded -> Canary       CanaryAnswer -> ready, adapter
    request -> Assignment, LeafRows  ...  LeafAnswer, VectorOffer -> Credit -> VectorBlock ... VectorEnd -> partial

The fleet (coordinator/fleet/fleet.py) carries frames, asks for gradients and fetches partials. The parts: membership
(which nodes take part), joining (what a worker shows first), scheduler (which node computes what), answers (of leaves),
transfers (of vectors), model_transfer (of the model's files). Each returns events, and the cluster alone acts on them;
dispatch says which message is whose.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from mlxdist.coordinator.cluster.bit_classes import BitClasses
from mlxdist.coordinator.cluster.data_watch import watch_data
from mlxdist.coordinator.cluster.dispatch import Dispatch
from mlxdist.coordinator.cluster.events import (
    Changed,
    Event,
    FalseAlarm,
    Lost,
    NodeNews,
    NotNeeded,
    Send,
    WrongAnswer,
    news_of,
    to_supervisor,
    to_worker,
)
from mlxdist.coordinator.cluster.joining import Joining
from mlxdist.coordinator.cluster.membership import Membership
from mlxdist.coordinator.cluster.model_transfer import Answer, ModelTransfer, Reading
from mlxdist.coordinator.cluster.node import Node, ready
from mlxdist.coordinator.cluster.offenders import Offenders
from mlxdist.coordinator.cluster.placement import Assigner
from mlxdist.coordinator.cluster.scheduler import Scheduler
from mlxdist.coordinator.cluster.settings import ClusterSettings
from mlxdist.coordinator.cluster.timeline import Mark, Timeline
from mlxdist.coordinator.cluster.transfers import Transfers
from mlxdist.coordinator.schedule.assign import assign
from mlxdist.coordinator.schedule.assignments import Assignment
from mlxdist.coordinator.schedule.rounds import Request, Round
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import MlxdistError
from mlxdist.protocol.manifest import Manifest
from mlxdist.protocol.numerics import Promise
from mlxdist.protocol.states import NodeEvent, NodeState
from mlxdist.protocol.transport import Parcel, Refusal
from mlxdist.protocol.tree import Span
from mlxdist.protocol.untrusted import quoted
from mlxdist.protocol.vectors import Vector
from mlxdist.protocol.wire import encode, fitted

LOOKS, LOOK_SECONDS = 10, 0.25  # all nodes are looked at so often between two heartbeats, or every so many seconds
MOST_NEWS = 4096  # that wait for the loop; beyond it the oldest are left out


@dataclass
class Cluster:
    """All nodes and the round in work. `news` is what a person may want to read, oldest first."""

    settings: ClusterSettings
    assigner: Assigner = assign
    now: float = 0.0
    news: deque[NodeNews] = field(default_factory=lambda: deque(maxlen=MOST_NEWS))
    members: Membership = field(init=False)
    bits: BitClasses = field(init=False)
    joining: Joining = field(init=False)
    scheduler: Scheduler = field(init=False)
    transfers: Transfers = field(default_factory=Transfers)
    model: ModelTransfer = field(default_factory=ModelTransfer)
    dispatch: Dispatch = field(init=False)
    offenders: Offenders = field(default_factory=Offenders)
    timeline: Timeline = field(default_factory=Timeline)
    _failure: MlxdistError | None = None
    _looked: float = -math.inf  # when the clock of all nodes was looked at
    _settled: int = 0  # changes of the round's assignments that were acted on
    _outbox: list[Parcel] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.members, self.scheduler = Membership(self.settings), Scheduler(self.settings, self.assigner)
        self.bits = BitClasses(self.settings)
        self.joining = Joining(self.settings, self.members, self.bits)
        self.dispatch = Dispatch(self.members, self.joining, self.scheduler, self.transfers, self.model, self.offenders)

    # ---- what the loop asks

    @property
    def nodes(self) -> dict[str, Node]:
        """All nodes by name, also those that are gone."""
        return self.members.nodes

    @property
    def round(self) -> Round | None:
        """The round in work, or the last one."""
        return self.scheduler.round

    @property
    def failure(self) -> MlxdistError | None:
        """The reason why the run cannot go on: a leaf that no node can compute, or no node left."""
        return self._failure or self.scheduler.failure or self.members.hopeless

    @failure.setter
    def failure(self, error: MlxdistError | None) -> None:
        self._failure = self._failure or error

    @property
    def introduction(self) -> m.Loaded | None:
        """The model and the adapter's tensors, as the first worker found them."""
        return self.joining.introduction

    @property
    def packing(self) -> str:
        """The mode in which all nodes pack rows."""
        return self.joining.packing

    @property
    def manifest(self) -> Manifest:
        """The adapter's tensors."""
        assert self.introduction is not None
        return self.introduction.manifest

    def ready(self) -> list[Node]:
        """The nodes that can work, in the order of their names."""
        return ready(self.nodes)

    def fetching(self, patience: float) -> bool:
        """Returns True while a node gets the model, or loads it then, and has gone on within `patience` seconds."""
        return any(
            node.worker.wanted_model
            and node.state in (NodeState.FETCHING, NodeState.LOADING)
            and self.now - node.worker.progressed <= patience
            for node in self.nodes.values()
        )

    def set_adapter(self, version: int, vector: Vector) -> None:
        """Sends a new adapter to every node that will work. `vector` must not change afterwards."""
        self.transfers.downloads.set_adapter(version, vector)
        for node in self.ready():
            if node.name not in self.scheduler.spare:  # a spare one gets it with its first leaf
                self._act(self.transfers.downloads.adapters_to(node, self.now))

    def set_reference(self, vector: Vector) -> None:
        """Sends the reference's adapter, once per worker. `vector` must not change afterwards."""
        self.transfers.downloads.set_reference(vector)
        for node in self.ready():
            self._act(self.transfers.downloads.reference_to(node, self.now))

    def begin(self, request: Request) -> Round:
        """Gives the leaves of a request to the nodes that are ready; without any they wait for one."""
        begun = self.scheduler.begin(request)
        self.transfers.uploads.limit = len(self.ready()) + 1
        self.transfers.uploads.reserve = 1 + (len(request.leaves) - 1).bit_length()
        self._settle()
        return begun

    def fetch_partials(self) -> list[tuple[Span, Vector]]:
        """The partials that have come since the last call. Each buffer is to be given back to the pool."""
        if self.round is None:
            return []
        partials, self.round.partials = self.round.partials, []
        return partials

    def begin_promise(self, from_step: int, earlier: Promise | None) -> Promise:
        """Promises what the nodes that are here allow, before the first round; see bit_classes.py."""
        return self.bits.begin(self.nodes, from_step, earlier)

    def end_promise(self, name: str, cause: str, step: int) -> None:
        """Adds news of a node whose bits are not those of its canary: the promise of the same bits ends."""
        ended = self.bits.end(f"{name} {cause}; steps before may have other last bits too", step, self.nodes)
        self._act([news_of(self.nodes[name], cause), *ended])

    def quarantine(self, name: str, reason: str) -> None:
        """Turns a node away for the rest of the run: its numbers are wrong."""
        if not self.nodes[name].gone:
            self._act(self.members.quarantine(self.nodes[name], reason))
            self._settle()

    def supervisor_ended(self, name: str, error: MlxdistError, final: bool) -> None:
        """Notes that a supervisor that the coordinator had started has ended; `final`: it is not started again."""
        self._act(self.members.supervisor_ended(name, error, final))
        self._settle()

    def goodbye(self, reason: str) -> None:
        """Tells every node that this run is over for it; no node is admitted any more."""
        self.members.over = True
        for node in self.nodes.values():
            if not node.gone:
                over = m.Shutdown(node.session, reason)
                if node.worker.data is not None:
                    self._act([to_worker(node, over)])
                self._act([to_supervisor(node, over)])

    # ---- what the fleet carries

    def take_outgoing(self) -> list[Parcel]:
        """The frames to send now."""
        self._act(self.transfers.blocks_down(self.nodes, self.now))
        outgoing, self._outbox = self._outbox, []
        return outgoing

    def take_readings(self) -> list[Reading]:
        """Returns what is to be read of the model's files now, for nodes that have no copy."""
        if self.model.idle:
            return []
        return self.model.due(self.now, quiet=self.transfers.quiet(self.ready(), self.joining.elements, self.now))

    def model_answered(self, answer: Answer) -> None:
        """Takes what was read of the model's files."""
        self._act(self.model.answered(answer, self.nodes, self.now))

    def receive(self, parcel: Parcel, now: float) -> None:
        """Takes one message. One that cannot be accepted is answered, and changes nothing."""
        self.now = now
        if self.offenders.silenced(parcel.channel, parcel.peer, now):
            return
        try:
            events = self.dispatch.events(parcel, now)
            self._act(events)
        except Exception as error:  # an error of ours, and a message that found it must not end the run
            events = self._cut_off(parcel, error)
            self._act(events)
        self._settle(changed=not all(isinstance(event, Send | Mark) for event in events))

    def _cut_off(self, parcel: Parcel, error: Exception) -> list[Event]:
        """Ends the session of a peer whose message made an error here, and hears nothing from that connection a while.

        The first error is kept for a person with its traceback, the others are counted.
        """
        self.offenders.add(parcel.channel, parcel.peer, error, self.now)
        node = self.members.by_peer(parcel.channel, parcel.peer)
        what = f"a message from it caused an error in the coordinator: {quoted(repr(error))}"
        if node is None:
            return [NodeNews("coordinator", "", f"a message from a stranger: {what}", log=True)]
        return self.members.cut_off(node, what)

    def turned_away(self, refusal: Refusal, now: float) -> None:
        """Notes a connection that the transport has refused."""
        self._act(self.dispatch.turned_away(refusal, now))

    def tick(self, now: float) -> None:
        """Looks at the clock: which node is silent, which is stuck, what is late, whether a pause is over.

        It may be called after every message: the nodes are looked at a few times in each heartbeat's time.
        """
        self.now = now
        if 0 <= now - self._looked < min(self.settings.timing.beat_seconds / LOOKS, LOOK_SECONDS):
            self._settle(changed=False)
            return
        self._looked = now
        self.members.speed = sum(node.speed.tokens_per_second for node in self.nodes.values() if node.there)
        stalled = self.transfers.uploads.stalled
        for node in list(self.nodes.values()):
            self._act(self.members.check(node, now))
            self._act(self._watch_data(node, now))
            waits = node.name in stalled and self.scheduler.in_work(node.name) is None
            if waits or self.model.waits_for_list(node):
                node.worker.progressed = now  # it waits for us
            if not node.worker.ended and (idle := self.scheduler.stuck(node, now)) is not None:
                if self.scheduler.busy(node.name) and self.scheduler.in_work(node.name) is None:
                    self._act(self.members.wrong_answer(node, f"its partial did not come for {idle:.3g} s", now))
                else:
                    self._act(self.members.restart_worker(node, f"it did nothing for {idle:.3g} s"))
        self._settle()
        self._act(self.scheduler.copy_late(self.nodes, now))

    def _watch_data(self, node: Node, now: float) -> list[Event]:
        patience = 0.0
        if node.worker.asked is not None:  # otherwise it is asked first
            loading = node.state in (NodeState.LOADING, NodeState.FETCHING)
            patience = self.settings.timing.start_timeout if loading else self.scheduler.patience(node)
        return watch_data(self.members, node, now, carrying=self.dispatch.carrying(node), patience=patience)

    def slept(self, gap: float, asleep: float, now: float) -> None:
        """Notes that this process did nothing, for seconds that its clock shows and others that it does not.

        No node is blamed for that time, and it measures nothing (see fleet/sleep_detector.py).
        """
        self._act(self.members.slept(gap, asleep, now))
        self.transfers.times.forget()
        self.model.slept(now)
        for assignment in self.round.assignments.values() if self.round is not None else ():
            assignment.began = now if asleep else min(assignment.began + gap, now)

    def unreachable(self, parcel: Parcel, now: float) -> None:
        """Notes that a message could not be sent."""
        self.members.unreachable(parcel.channel, parcel.peer, now)

    # ---- events

    def _act(self, events: Iterable[Event]) -> None:
        """Does what the events say, in their order."""
        for event in events:
            match event:
                case Send(channel=channel, peer=peer, message=message, payload=payload):
                    self._outbox.append(Parcel(channel, peer, encode(fitted(message), payload)))
                case Changed():
                    pass
                case NodeNews():
                    self.news.append(event)
                case Mark():
                    self.timeline.add(event)
                case Lost(node=node):
                    self.timeline.cut_short(node.name, "lost", self.scheduler.first_of(node.name), self.now)
                    spans = self.scheduler.lost(node.name, event.blame)
                    self.transfers.drop(node.name)
                    self.model.drop(node.name)
                    self.news.append(news_of(node, event.cause, event.action, spans))
                case FalseAlarm(name=name):
                    self.scheduler.false_alarm(name)
                case WrongAnswer(node=node, cause=cause, counts=counts):
                    if not node.worker.ended:
                        members = self.members
                        self._act(
                            members.wrong_answer(node, cause, self.now)
                            if counts
                            else members.restart_worker(node, cause, blame=False)
                        )
                case NotNeeded(assignment=assignment):
                    loser = self.nodes[assignment.node]
                    self.timeline.cut_short(loser.name, "dropped", assignment, self.now)
                    loser.worker.cancelled.add(assignment.attempt)
                    self._act([to_worker(loser, m.Cancel(loser.session, assignment.attempt))])
                case Assignment():
                    node = self.nodes[event.node]
                    node.move(NodeEvent.ASSIGNED)
                    request = self.scheduler.current().request
                    self._act(self.bits.given(node, request, self.nodes))
                    self._act(self.transfers.downloads.assignment_to(node, request, event, self.now))

    def _settle(self, *, changed: bool = True) -> None:
        """Goes on after anything that happened: idle nodes are ready, pending leaves are placed, vectors travel.

        `changed`: which nodes can work may have changed. Otherwise nothing is looked at that depends on their number.
        """
        round_ = self.round
        if not changed and round_ is not None and not round_.pending and round_.assignments.changes == self._settled:
            self._act(self.transfers.admit(round_, self.nodes, self.now))
            return
        for node in self.nodes.values():
            if node.state is NodeState.BUSY and not self.scheduler.busy(node.name):
                node.move(NodeEvent.FINISHED)
        if self.round is None:
            return
        self._act(self.transfers.stop_unneeded(self.round, self.nodes, self.now))
        pending = bool(self.round.pending)
        self._act(self.bits.release(self.nodes, self.members.absent, self.now, pending=pending))
        self._act(self.scheduler.place(self.nodes, self.now))
        self._act(self.transfers.admit(self.round, self.nodes, self.now))
        self._settled = self.round.assignments.changes
