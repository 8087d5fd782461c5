"""Joining: a node shows its name and protocol, then its worker's packages, model and canary answers.

Register -> Accept      Hello -> Welcome      Loaded -> Canary      CanaryAnswer -> ready
"""

from dataclasses import dataclass

import msgspec

from mlxdist.coordinator.cluster.bit_classes import BitClasses
from mlxdist.coordinator.cluster.compatibility import check_model, check_versions
from mlxdist.coordinator.cluster.events import Event, FalseAlarm, NodeNews, Send, news_of, to_supervisor, to_worker
from mlxdist.coordinator.cluster.membership import Membership
from mlxdist.coordinator.cluster.node import UNKNOWN, Control, Node
from mlxdist.coordinator.cluster.settings import ClusterSettings
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import MismatchError, WireError
from mlxdist.protocol.numerics import CANARY_TIMES, WORKER_ENVIRONMENT
from mlxdist.protocol.packing import weaker
from mlxdist.protocol.states import NodeEvent, NodeState
from mlxdist.protocol.transport import CONTROL
from mlxdist.protocol.untrusted import NODE_NAME, quoted

MOST_ELEMENTS = 2**33  # of an adapter: 32 GiB
RIVAL_HEARTBEATS = 2  # of the first supervisor, after which a second one of its name is refused


@dataclass
class Joining:
    """A node's way to ready. `introduction`: what the first worker loaded; all others must have loaded the same."""

    settings: ClusterSettings
    members: Membership
    bits: BitClasses
    introduction: m.Loaded | None = None
    packing: str = ""  # the mode of all nodes: the one asked for, or that of the node that allows least

    def __post_init__(self) -> None:
        self.packing = self.packing or self.settings.spec.packing

    @property
    def elements(self) -> int:
        """The float32 elements of a gradient; 0 before the first worker has loaded its model."""
        return manifests.size(self.introduction.manifest) if self.introduction is not None else 0

    # ---- the supervisor

    def register(self, message: m.Register, peer: bytes, now: float, owner: str = "") -> list[Event]:
        """Admits a supervisor, refuses it, or lets it ask again while an earlier one of its name is tried.

        `owner`: the name that the key of its connection belongs to; empty where connections are not encrypted.
        """
        members = self.members
        if members.over:
            return []
        events: list[Event] = []
        known = members.nodes.get(message.name)
        doomed = known.kill_requested if known is not None else 0
        rival = known is not None and not known.gone and known.control.peer != peer
        reason = refusal(message, owner) or members.quarantined.get(message.name, "")
        here = members.by_peer(CONTROL, peer)
        if here is not None and here.name != message.name:
            reason = reason or f"this connection is {here.name}'s, and a node has one name"
        if known is not None and rival and not reason:
            reason, events = self._taken(known, message, now)
        if reason:
            return [*events, Send(CONTROL, peer, m.Reject(reason))]
        if known is not None and rival:
            if known.control.closed is None and not members.silent(known, now):
                return events  # it asks again; by then the first one has sent a heartbeat or not
            events += members.lose(known, NodeEvent.LOST, "its supervisor was restarted")
        if known is None or known.gone:
            if known is None and not members.room():
                return [
                    *events,
                    Send(CONTROL, peer, m.Reject("too many nodes have taken part in this run: start another one")),
                ]
            if too_large := self.settings.memory.refusal(message.name, message.host):
                news = NodeNews(message.name, "refused", too_large.removeprefix(f"{message.name} "))
                return [*events, news, Send(CONTROL, peer, m.Reject(too_large))]
            if known is not None and peer == known.control.peer and message.worker and message.worker == known.lost_pid:
                events.append(FalseAlarm(known.name))
            known = self._admit(message, peer, now, known)
            events.append(news_of(known, "connected"))
        elif known.worker.ended:
            known.start_session(members.new_session(), now)
        known.heard(now)
        events.append(to_supervisor(known, self._accept(known)))
        if message.worker and doomed in (message.worker, UNKNOWN):  # the restart of its worker was lost
            known.kill_requested = message.worker
            events.append(to_supervisor(known, m.Restart(known.session, message.worker)))
        return events

    def _admit(self, message: m.Register, peer: bytes, now: float, before: Node | None) -> Node:
        node = Node(message.name, self.members.new_session(), Control(peer, now), host=message.host)
        node.worker.progressed = now
        if before is not None:
            node.speed, node.early_exits = before.speed, before.early_exits
            node.wrong_answers = before.wrong_answers
        self.members.nodes[node.name] = node
        self.members.given_up.pop(node.name, None)
        return node

    def _accept(self, node: Node) -> m.Accept:
        timing = self.settings.timing
        return m.Accept(
            node.session,
            self.settings.data_port,
            timing.beat_seconds,
            WORKER_ENVIRONMENT,
            timing.restart_seconds,
            memory_limit_bytes=self.settings.memory.limits.get(node.name, 0),
        )

    def _taken(self, known: Node, message: m.Register, now: float) -> tuple[str, list[Event]]:
        """The reason to refuse a second supervisor of a name: the first is on another host, or sends heartbeats."""
        events: list[Event] = []
        if known.control.rival_heartbeats is None:
            known.control.rival_heartbeats = 0
            events = self.members.probe(known, now)
        if message.host.get("host") == known.host.get("host") and known.control.rival_heartbeats < RIVAL_HEARTBEATS:
            return "", events
        known.control.rival_heartbeats = None
        return f"a node named {message.name!r} takes part already; give this one another name", events

    # ---- the worker

    def hello(self, node: Node, message: m.Hello, peer: bytes, now: float) -> list[Event]:
        """Takes a worker's first message on its data connection. Raises MismatchError for other package versions.

        One from another connection than the worker's does not come here.
        """
        if node.worker.data == peer and node.state in (NodeState.LOADING, NodeState.FETCHING):
            return []  # said again while the welcome was on its way
        if node.worker.data is not None:
            return self.members.start_again(node, "its worker connected again", now)
        node.move(NodeEvent.WORKER_HELLO)
        node.worker.data = peer
        check_versions(node.name, self.settings.versions, message.versions)
        spec = msgspec.structs.replace(self.settings.spec, packing=self.packing)
        return [news_of(node, "loading the model"), to_worker(node, m.Welcome(node.session, spec))]

    def differs(self, message: m.Loaded) -> bool:
        """Returns True for other model files than those of the first node."""
        return self.introduction is not None and message.model_hash != self.introduction.model_hash

    def loaded(self, node: Node, message: m.Loaded, now: float) -> list[Event]:
        """Takes a worker's description of its model.

        Raises MismatchError for another model than the first one's, and for rows that are packed in another way than
        those of a run that has begun.
        """
        if node.state is not NodeState.LOADING:
            raise WireError("a model was loaded twice")
        if self.introduction is None and manifests.size(message.manifest) > MOST_ELEMENTS:
            raise WireError(f"an adapter of more than {MOST_ELEMENTS} elements")
        self.introduction = self.introduction or message
        check_model(node.name, self.introduction, message)
        if message.packing != self.packing:
            return self._packed_otherwise(node, message.packing, now)
        return [to_worker(node, m.Canary(node.session))]

    def _packed_otherwise(self, node: Node, mode: str, now: float) -> list[Event]:
        """Begins the sessions of all nodes again, with the slower mode that this one allows."""
        if weaker(self.packing, mode) != mode:
            raise WireError(f"rows packed as {quoted(mode, 40)}, where {self.packing} was asked for")
        if self.settings.packing_is_fixed or self.bits.promise is not None:
            raise MismatchError(
                f"{node.name} cannot pack rows as the run does ({self.packing}; there: {mode}): its last bits would be "
                "others. It can take part when a run starts with it"
            )
        self.packing = mode
        there = [other for other in self.members.nodes.values() if not other.gone and other.worker.data is not None]
        why = f"{node.name} computes rows {mode}, so all nodes do"
        return [event for other in there for event in self.members.start_again(other, why, now)]

    def canary(self, node: Node, message: m.CanaryAnswer) -> list[Event]:
        """Takes a worker's canary answers: it is ready."""
        if len(message.digests) != CANARY_TIMES or not all(message.digests):
            raise WireError(f"{len(message.digests)} canary answers where {CANARY_TIMES} were due")
        node.move(NodeEvent.CANARY_ANSWERED)
        node.canary, node.early_exits = message.digests, 0
        return self.bits.joined(node)


def refusal(message: m.Register, owner: str = "") -> str:
    """The reason to refuse a supervisor, as far as its message alone tells; else empty."""
    if message.protocol != m.PROTOCOL_VERSION:
        theirs = f"{quoted(message.name)} speaks protocol {message.protocol}, the coordinator {m.PROTOCOL_VERSION}"
        return f"{theirs}: install the same mlxdist on both"
    if not NODE_NAME.fullmatch(message.name):  # it names a log file
        allowed = "letters, digits, points, dashes, underscores"
        return f"a node cannot be named '{quoted(message.name, 80)}': --name takes {allowed}"
    if owner not in ("", message.name):
        return f"its key belongs to the node {owner}, and it calls itself {message.name}: start it with --name {owner}"
    return ""
