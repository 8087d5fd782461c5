"""The way of each message to its part of the cluster: one parcel in, the events that follow from it out."""

from dataclasses import dataclass

from mlxdist.coordinator.cluster.answers import leaf_answered, nonfinite_leaf
from mlxdist.coordinator.cluster.events import Changed, Event, NodeNews, Send, news_of
from mlxdist.coordinator.cluster.joining import Joining
from mlxdist.coordinator.cluster.membership import Membership
from mlxdist.coordinator.cluster.model_transfer import ModelTransfer
from mlxdist.coordinator.cluster.node import Node
from mlxdist.coordinator.cluster.offenders import Offenders
from mlxdist.coordinator.cluster.scheduler import Scheduler
from mlxdist.coordinator.cluster.transfers import Transfers
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import ConfigError, MismatchError, NodeError, StaleError, WireError
from mlxdist.protocol.states import NodeState
from mlxdist.protocol.transport import CONTROL, DATA, REVOKED, Parcel, Refusal, is_probe
from mlxdist.protocol.untrusted import sentence
from mlxdist.protocol.wire import decode

# Messages that come for every block, leaf and heartbeat; a node whose state they change is news, or lost.
STEADY = (m.VectorBlock, m.Credit, m.LeafAnswer, m.Heartbeat, m.Pong)
FORGOTTEN = "its key was taken off the list of the coordinator's Mac (mlxdist nodes forget)"


@dataclass(frozen=True)
class Dispatch:
    """The parts of the cluster that messages go to."""

    members: Membership
    joining: Joining
    scheduler: Scheduler
    transfers: Transfers
    model: ModelTransfer
    offenders: Offenders

    def events(self, parcel: Parcel, now: float) -> list[Event]:
        """The events that follow from a parcel. One that cannot be accepted is answered, and changes nothing."""
        channel, peer = parcel.channel, parcel.peer
        if parcel.owner == REVOKED:
            return self._revoked(channel, peer, now)
        if is_probe(parcel.frames):
            node = self.members.by_data(peer) if channel == DATA else None
            why = "its data connection broke and was restored"
            return self.members.start_again(node, why, now) if node is not None else []
        try:
            message, payload = decode(parcel.frames)
        except WireError as error:
            return self._refused(channel, peer, str(error), m.Reject(str(error)), now)
        if isinstance(message, m.Register):
            if channel == CONTROL:
                if self.members.by_peer(channel, peer) is None and not self.offenders.may_answer(channel, peer, now):
                    return []
                return self.joining.register(message, peer, now, parcel.owner)
            if not self.offenders.may_answer(channel, peer, now):
                return []
            return [Send(channel, peer, m.Reject("this is the data port of the run: --connect takes its control port"))]
        session = getattr(message, "session", None)
        node = self.members.by_session(session)
        if node is None:
            if not isinstance(session, m.SessionId) or not self.offenders.may_answer(channel, peer, now):
                return []
            return [Send(channel, peer, m.Stale(session, type(message).__name__, over=True))]
        if parcel.owner not in ("", node.name):
            return [Send(channel, peer, m.Stale(node.session, f"a message of {node.name} under another node's key"))]
        events = self._of_node(node, message, payload, channel, peer, now)
        return events if isinstance(message, STEADY) else [*events, Changed()]

    def _revoked(self, channel: str, peer: bytes, now: float) -> list[Event]:
        """Turns away a node whose key was admitted until a moment ago; its leaves go to others."""
        node = self.members.by_peer(channel, peer)
        if node is not None:
            return self.members.turn_away(node, MismatchError(FORGOTTEN))
        return [Send(channel, peer, m.Reject(FORGOTTEN))] if self.offenders.may_answer(channel, peer, now) else []

    def turned_away(self, refusal: Refusal, now: float) -> list[Event]:
        """Counts a connection that the transport has refused, and says so once a minute for each address."""
        if not self.offenders.refuse("connections", refusal.address.encode(), now):
            return []
        what = f"a connection from {refusal.address} was refused: {refusal.reason} ({self.offenders.refused} so far)"
        return [NodeNews("coordinator", "", what, log=True)]

    def _refused(self, channel: str, peer: bytes, what: str, answer: m.Message, now: float) -> list[Event]:
        """Counts a message that is not taken, says so once a minute, and answers as long as the peer may be reading."""
        events: list[Event] = []
        if self.offenders.refuse(channel, peer, now):
            said = f"a message was refused: {what} ({self.offenders.refused} so far)"
            events.append(NodeNews("coordinator", "", said, log=True))
        if self.offenders.may_answer(channel, peer, now):
            events.append(Send(channel, peer, answer))
        return events

    def _of_node(
        self, node: Node, message: m.Message, payload: memoryview, channel: str, peer: bytes, now: float
    ) -> list[Event]:
        events: list[Event] = []
        owner = node.control.peer if channel == CONTROL else node.worker.data
        if owner not in (None, peer):
            what = f"{type(message).__name__} from another connection than {node.name}'s"  # a copy of its message
            return self._refused(channel, peer, what, m.Stale(node.session, what), now)
        try:
            if channel == DATA:
                return self._on_data(node, message, payload, peer, now)
            events += self.members.heard(node, now, busy=self.scheduler.busy(node.name))
            return events + self.members.on_control(node, message, self.scheduler.in_work(node.name))
        except StaleError as error:
            stream = message.stream if isinstance(message, m.VectorOffer | m.VectorBlock | m.VectorEnd) else 0
            return [*events, Send(channel, peer, m.Stale(node.session, str(error), stream))]
        except (MismatchError, ConfigError) as error:
            return events + self.members.turn_away(node, error)
        except (WireError, ValueError) as error:  # ValueError: the state table has no place for the message
            return events + self.members.wrong_answer(node, f"it sent what makes no sense: {error}", now)

    def _on_data(self, node: Node, message: m.Message, payload: memoryview, peer: bytes, now: float) -> list[Event]:
        """Takes a message of a worker. Raises StaleError for one of another worker, WireError for nonsense."""
        if node.worker.ended or (node.worker.data is None and not isinstance(message, m.Hello)):
            raise StaleError(f"{type(message).__name__} from another worker than {node.name}'s")
        node.heard_data(now, carrying=self.carrying(node))
        if isinstance(message, m.Pong):  # the connection is there; whether the worker works is another matter
            return []
        progress = self._is_progress(node, message)
        events = self._of_worker(node, message, payload, peer, now)
        if progress:
            node.worker.progressed = now
        return events

    def carrying(self, node: Node) -> bool:
        """Returns True while blocks travel to or from a node's worker, of vectors or of the model's files."""
        return self.transfers.times.under_way(node.name) or self.model.under_way(node.name)

    def _is_progress(self, node: Node, message: m.Message) -> bool:
        """True if the message, once it is accepted, is work. What can be repeated without end is none."""
        match message:
            case m.Progress():
                return node.state is NodeState.LOADING
            case m.BlockWanted():
                return self.model.is_new(node.name, message)
            case m.Cancel(attempt=attempt):
                return attempt in node.worker.cancelled
            case m.Credit(stream=stream, upto=upto):
                return self.transfers.downloads.is_new(node.name, stream, upto)
            case _:
                return not isinstance(message, m.Received | m.BlockTaken)

    def _of_worker(self, node: Node, message: m.Message, payload: memoryview, peer: bytes, now: float) -> list[Event]:
        downloads = self.transfers.downloads
        match message:
            case m.Hello():
                return self.joining.hello(node, message, peer, now)
            case m.ModelWanted():
                return self.model.wanted(node)
            case m.BlockWanted():
                return self.model.block_wanted(node, message)
            case m.BlockTaken():
                return self.model.block_taken(node, message, now)
            case m.ModelHere():
                return self.model.here(node)
            case m.Loaded() if self.joining.differs(message) and self.model.can_send(node):
                return self.model.wanted(node, "it has other files of the model")
            case m.Loaded():
                return self.joining.loaded(node, message, now)
            case m.CanaryAnswer():
                events = self.joining.canary(node, message)
                return events if node.held_back else [*events, *downloads.adapters_to(node, now)]
            case m.Progress(message=words):
                return [news_of(node, sentence(words))]
            case m.Fault():
                return self._on_fault(node, message)
            case m.LeafAnswer():
                return self._on_leaf(node, message, payload, now)
            case m.Cancel(attempt=attempt):
                node.worker.cancelled.discard(attempt)
                return []
            case m.VectorOffer():
                return self.transfers.offered(node, message, self.scheduler.current(), self.joining.elements, now)
            case m.VectorBlock():
                return self.transfers.block(node, message, payload, now)
            case m.VectorEnd():
                return self.transfers.ended(node, message, self.scheduler, self.members.nodes, now)
            case m.Credit(stream=stream, upto=upto):
                downloads.credit(node.name, stream, upto)
                return []
            case m.Received():
                return self.transfers.received(node, message, now)
            case _:
                raise WireError(f"{type(message).__name__} on the data connection")

    def _on_leaf(self, node: Node, message: m.LeafAnswer, payload: memoryview, now: float) -> list[Event]:
        events = leaf_answered(node, message, payload, self.scheduler, self.members.nodes, now)
        self.transfers.leaf_answered(node, message.leaf, now)
        return events

    def _on_fault(self, node: Node, message: m.Fault) -> list[Event]:
        if message.kind == "nonfinite" and message.leaf >= 0:
            return nonfinite_leaf(node, message, self.scheduler, self.members.nodes)
        if node.state in (NodeState.LOADING, NodeState.FETCHING):
            kind = ConfigError if message.kind == "config" else NodeError
            return self.members.turn_away(node, kind(f"{node.name}: {sentence(message.message)}"))
        return self.members.restart_worker(node, sentence(message.message))
