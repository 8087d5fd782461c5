"""Who takes part: admission, beats, silence, loss. The control connection's half of the cluster; no socket, no clock.

    Register -> Accept      Heartbeat -> HeartbeatAck      silence -> suspect -> dead      a worker's end -> its work to others

A node has one supervisor and one worker at a time. Every worker gets a life (session) of its own, so that nothing of
its predecessor counts. Times are monotonic seconds that the caller gives.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlxdist.coordinator.cluster.node import Node
from mlxdist.coordinator.cluster.scheduler import said
from mlxdist.coordinator.cluster.settings import NodeNews, Rules
from mlxdist.coordinator.config.hosts import NAME
from mlxdist.coordinator.memory.node_memory import at_work
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import MlxdistError, NodeError, WireError
from mlxdist.protocol.leaves import Leaf
from mlxdist.protocol.numerics import WORKER_ENVIRONMENT
from mlxdist.protocol.states import NodeEvent, NodeState
from mlxdist.protocol.transport import CONTROL, DATA
from mlxdist.protocol.tree import Span

SILENT_BEATS = 1.5  # beats without a word after which the connection is tried
RIVAL_BEATS = 2  # of the first supervisor, after which a second one of its name is refused
EARLY_EXITS = 3  # workers in a row that ended before they were ready: the node is given up


@dataclass
class Membership:
    """The nodes by name. `on_lost(node, blame)` gives away what its worker had, and returns those runs of leaves.

    `at_work` says whether a node has anything to do, `in_work` which leaf it computes now. `on_survived(name)`: the
    worker of a node that was lost is still there.
    """

    rules: Rules
    send: Callable[[str, bytes, m.Message], None]
    on_lost: Callable[[Node, bool], Sequence[Span]]
    at_work: Callable[[Node], bool]
    in_work: Callable[[Node], Leaf | None]
    on_survived: Callable[[str], None]
    nodes: dict[str, Node] = field(default_factory=dict)
    news: deque[NodeNews] = field(default_factory=deque)
    given_up: dict[str, MlxdistError] = field(default_factory=dict)
    quarantined: dict[str, str] = field(default_factory=dict)  # why, by name: not admitted again
    over: bool = False
    _sessions: int = 0

    def ready(self) -> list[Node]:
        """The nodes that can work, in the order of their names."""
        return [node for _, node in sorted(self.nodes.items()) if node.works]

    def by_session(self, session: object) -> Node | None:
        """The node that a message belongs to, if it still takes part."""
        return next((node for node in self.nodes.values() if node.session == session and not node.gone), None)

    def by_data(self, peer: bytes) -> Node | None:
        """The node whose worker holds this data connection, if it still takes part."""
        return next((node for node in self.nodes.values() if node.data == peer and not node.gone), None)

    def tell(self, node: Node, cause: str, action: str = "", lost: Sequence[Span] = ()) -> None:
        """News of a node: what happened, what is done about it, and the leaves that go from it to others."""
        done = "; ".join(part for part in (action, said(lost)) if part)
        self.news.append(NodeNews(node.name, node.state.value, cause, action=done, leaves=tuple(lost)))

    @property
    def hopeless(self) -> MlxdistError | None:
        """Why nobody can work any more: every node that was launched is given up, and nobody else is there."""
        if not self.rules.launched or not self.rules.launched <= self.given_up.keys():
            return None
        return None if any(not node.gone for node in self.nodes.values()) else next(iter(self.given_up.values()))

    # ---- coming

    def enlist(self, message: m.Register, peer: bytes, now: float) -> None:
        """A supervisor asks: admit it, refuse it, or let it ask again while an earlier one of its name is tried."""
        if self.over:
            return
        known = self.nodes.get(message.name)
        rival = known is not None and not known.gone and known.control != peer
        reason = unfit(message) or self.quarantined.get(message.name, "")
        reason = reason or (self._taken(known, message, now) if known is not None and rival else "")
        if reason:
            self.send(CONTROL, peer, m.Reject(reason))
            return
        if known is not None and rival:
            if not self._silent(known, now):
                return  # it asks again; by then the first one has beaten or not
            self.lose(known, NodeEvent.LOST, "its supervisor was started anew")
        if (known is None or known.gone) and (fault := self.rules.memory.refusal(message.name, message.host)):
            self.news.append(NodeNews(message.name, "refused", fault.removeprefix(f"{message.name} ")))
            self.send(CONTROL, peer, m.Reject(fault))
            return
        if known is None or known.gone:
            node = Node(message.name, self._new_session(), peer, now, host=message.host, progressed=now)
            if (
                known is not None
                and peer == known.control
                and message.worker
                and message.worker == known.last_worker_pid
            ):
                self.on_survived(known.name)
            if known is not None:
                node.speed, node.early_exits = known.speed, known.early_exits
            self.nodes[message.name] = known = node
            self.given_up.pop(message.name, None)
            self.tell(known, "connected")
        elif known.spent:
            known.session, known.spent, known.progressed = self._new_session(), False, now
        known.heard(now)
        rules = self.rules
        admit = m.Accept(
            known.session,
            rules.data_port,
            rules.beat_seconds,
            WORKER_ENVIRONMENT,
            memory_limit_bytes=rules.memory.limits.get(known.name, 0),
            restart_seconds=rules.restart_seconds,
        )
        self.send(CONTROL, peer, admit)

    def _taken(self, known: Node, message: m.Register, now: float) -> str:
        """Why a second supervisor of a name is refused: the first is on another host, or beats."""
        if known.rival is None:
            known.rival, known.beats_since_rival = now, 0
            self._probe(known, now)
        if message.host.get("host") == known.host.get("host") and known.beats_since_rival < RIVAL_BEATS:
            return ""
        known.rival = None
        return f"a node named {message.name!r} takes part already; give this one another name"

    def _silent(self, node: Node, now: float) -> bool:
        return node.closed is not None or now - node.last_beat > SILENT_BEATS * self.rules.beat_seconds

    def _new_session(self) -> m.SessionId:
        self._sessions += 1
        return m.SessionId(self.rules.run, self.rules.incarnation, self._sessions)

    # ---- being there

    def on_control(self, node: Node, message: m.Message, now: float) -> None:
        """A message of an admitted supervisor. Raises WireError for one that has no place here."""
        node.heard(now)
        if node.state is NodeState.SUSPECT:
            node.move(NodeEvent.BEAT_AGAIN_BUSY if self.at_work(node) else NodeEvent.BEAT_AGAIN)
            self.tell(node, "beats again")
        match message:
            case m.Heartbeat(count=count, worker_pid=pid):
                self.send(CONTROL, node.control, m.HeartbeatAck(node.session, count))
                self._look_at_worker(node, pid)
            case m.Log(lines=lines):
                self.news.extend(NodeNews(node.name, node.state.value, line, log=True) for line in lines)
            case m.WorkerExit(cause=cause, tail=tail):
                self._worker_ended(node, cause, tail)
            case m.Leave():
                self.lose(node, NodeEvent.BYE, "left", blame=False)
            case _:
                raise WireError(f"{type(message).__name__} on the control connection")

    def _look_at_worker(self, node: Node, pid: int) -> None:
        """A beat says which worker there is: what was lost of WorkerExit and Restart is made good."""
        if pid and pid == node.condemned:
            self.send(CONTROL, node.control, m.Restart(node.session, pid, "it was to end"))
        elif not node.spent:
            if not pid and node.worker_pid:
                self._worker_ended(node, "the worker ended", ())
            node.worker_pid = pid

    def _worker_ended(self, node: Node, cause: str, tail: tuple[str, ...]) -> None:
        cause += at_work(cause, self.in_work(node), self.rules.spec.segment_size)
        last = "\n".join(f"  | {line}" for line in tail)
        whole = cause + (f"; its last lines:\n{last}" if last else "")
        if node.spent:  # it was told to, and its work was given away then
            return
        if node.state in (NodeState.CONNECTING, NodeState.LOADING):
            node.early_exits += 1
        if node.early_exits >= EARLY_EXITS:
            self.turn_away(node, NodeError(f"{node.name}: {whole}"))
        else:
            self.lose(node, NodeEvent.WORKER_EXIT, whole if node.early_exits else cause)

    def tick(self, now: float) -> None:
        """Look at the beats and the connections."""
        rules = self.rules
        for node in list(self.nodes.values()):
            if node.gone:
                continue
            silent = now - node.last_beat
            if silent > rules.dead_seconds:
                self.lose(node, NodeEvent.LOST, f"not heard for {silent:.3g} s")
            elif node.closed is not None and now - node.closed > rules.return_seconds:
                self.lose(node, NodeEvent.LOST, f"its connection was closed, and {rules.return_seconds:.3g} s passed")
            elif (silent > rules.suspect_seconds or node.closed is not None) and node.works:
                node.move(NodeEvent.SILENT)
                self.tell(node, "its connection is closed" if node.closed else f"no beat for {silent:.3g} s")
            elif node.data_closed is not None and now - node.data_closed > rules.return_seconds:
                self.begin_anew(node, f"its data connection stayed closed for {rules.return_seconds:.3g} s", now)
            elif node.state is NodeState.CONNECTING and node.worker_pid and now - node.progressed > rules.first_seconds:
                self.restart_worker(node, f"its worker did not say hello for {rules.first_seconds:.3g} s")
            if not node.gone and silent > SILENT_BEATS * rules.beat_seconds and now - node.probed > rules.beat_seconds:
                self._probe(node, now)

    def _probe(self, node: Node, now: float) -> None:
        """A message that needs no answer: that it cannot be sent says that the connection is closed."""
        node.probed = now
        self.send(CONTROL, node.control, m.HeartbeatAck(node.session, -1))

    def unreachable(self, channel: str, peer: bytes, now: float) -> None:
        """A message could not be sent: that connection is closed."""
        for node in self.nodes.values():
            if not node.gone and channel == CONTROL and node.control == peer and node.closed is None:
                node.closed = now
            if not node.gone and channel == DATA and node.data == peer and node.data_closed is None:
                node.data_closed = now

    def slept(self, gap: float, asleep: float, now: float) -> None:
        """The coordinator itself did nothing for `gap` seconds, and its Mac slept for `asleep` that `now` leaves out.

        Nobody's silence in that time counts. After a sleep every node gets all the time there is to be heard again:
        its connection may have to be made anew.
        """

        def later(time: float) -> float:
            return now if asleep else min(time + gap, now)

        for node in self.nodes.values():
            node.last_beat, node.progressed = later(node.last_beat), later(node.progressed)
            node.closed = None if node.closed is None else later(node.closed)
            node.data_closed = None if node.data_closed is None else later(node.data_closed)
        if asleep:
            cause = f"the coordinator's Mac slept for {asleep:.0f} s, or its clock was set"
            self.news.append(NodeNews("", "awake", cause, action="its nodes have time to return"))
        elif gap > self.rules.suspect_seconds:
            cause = f"the coordinator did nothing for {gap:.3g} s (asleep, or stopped)"
            self.news.append(NodeNews("", "awake", cause, action="nobody's silence in that time counts"))

    # ---- going

    def lose(self, node: Node, event: NodeEvent, cause: str, action: str = "", *, blame: bool = True) -> None:
        """The node's worker, or the whole node, is gone: its work goes to others."""
        node.move(event)
        place = len(self.news)
        node.spent = True
        node.last_worker_pid, node.worker_pid = node.worker_pid, 0
        lost = self.on_lost(node, blame)
        node.forget_worker()
        self.tell(node, cause, action, lost)
        self.news.insert(place, self.news.pop())  # the cause stands before what follows of it, such as a pause

    def begin_anew(self, node: Node, reason: str, now: float) -> None:
        """Its worker lives, its data connection does not: both get a new life, in which nothing of the old one counts.

        The supervisor, told that the old life is over, asks for the new one and hands it to the same worker, which
        keeps its model.
        """
        old = node.session
        self.lose(node, NodeEvent.CONNECTION_LOST, reason, blame=False)
        node.session, node.spent, node.progressed = self._new_session(), False, now
        self.send(CONTROL, node.control, m.Stale(old, reason, over=True))

    def restart_worker(self, node: Node, reason: str) -> None:
        """The worker is of no use: its work goes to others, and the supervisor starts another."""
        node.condemned = node.worker_pid
        self.send(CONTROL, node.control, m.Restart(node.session, node.worker_pid, reason))
        if not node.spent:
            self.lose(node, NodeEvent.WORKER_EXIT, reason, "its worker is started anew")

    def turn_away(self, node: Node, error: MlxdistError) -> None:
        """The node cannot take part, and is told why; the others go on."""
        for channel, peer in ((DATA, node.data), (CONTROL, node.control)):
            if peer is not None:
                self.send(channel, peer, m.Reject(str(error)))
        self.given_up[node.name] = error
        self.lose(node, NodeEvent.BYE, f"turned away: {error}", blame=False)

    def quarantine(self, node: Node, reason: str) -> None:
        """The node's numbers are wrong: it takes no part in this run any more."""
        self.quarantined[node.name] = reason
        self.turn_away(node, NodeError(reason))

    def supervisor_ended(self, name: str, error: MlxdistError, final: bool) -> None:
        """A supervisor that the coordinator had started has ended; `final`: it is not started again."""
        node = self.nodes.get(name)
        if node is not None and not node.gone:
            self.lose(node, NodeEvent.LOST, "its supervisor ended")
        if final:
            self.given_up.setdefault(name, error)


def unfit(message: m.Register) -> str:
    """Why a supervisor cannot take part, whoever else does; empty when it can."""
    if message.protocol != m.PROTOCOL_VERSION:
        theirs = f"{message.name} speaks protocol {message.protocol}, the coordinator {m.PROTOCOL_VERSION}"
        return f"{theirs}: install the same mlxdist on both"
    if not NAME.fullmatch(message.name):  # it names a log file
        allowed = "letters, digits, points, dashes, underscores"
        return f"a node cannot be named {message.name[:80]!r}: --name takes {allowed}"
    return ""
