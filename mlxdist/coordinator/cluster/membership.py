"""The nodes that take part: heartbeats, silence, loss. The control connection's half of the cluster; no socket.

    Heartbeat -> HeartbeatAck      silence -> suspect -> dead      a worker's end -> its leaves to others

A node has one supervisor and one worker at a time. Every worker gets a session of its own, so that nothing of the one
before it counts. Each call is about one node and returns what follows from it. Times are monotonic seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from secrets import token_hex

from mlxdist.coordinator.cluster.events import Event, Lost, NodeNews, Send, news_of, to_supervisor
from mlxdist.coordinator.cluster.node import UNKNOWN, Node
from mlxdist.coordinator.cluster.settings import ClusterSettings
from mlxdist.coordinator.memory.node_memory import at_work
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import MlxdistError, NodeError, WireError
from mlxdist.protocol.leaves import Leaf
from mlxdist.protocol.limits import LINE_CHARS
from mlxdist.protocol.states import NodeEvent, NodeState
from mlxdist.protocol.transport import CONTROL, DATA
from mlxdist.protocol.untrusted import quoted, sentence

SILENT_HEARTBEATS = 1.5  # heartbeats without a word after which the connection is tried
MOST_NODES = 512  # by name, those that are gone included
TAIL_LINES = 20  # of a worker that ended, in a sentence
EARLY_EXITS = 3  # workers in a row that ended before they were ready: the node is given up
MOST_RESTARTS = 3  # of a node's workers within an hour, for wrong answers; after that the node is put out
HOUR = 3600.0


def _random_bits() -> str:
    return token_hex(16)


@dataclass
class Membership:
    """The nodes by name, those that are gone included."""

    settings: ClusterSettings
    nodes: dict[str, Node] = field(default_factory=dict)
    given_up: dict[str, MlxdistError] = field(default_factory=dict)
    quarantined: dict[str, str] = field(default_factory=dict)  # the reason by name: not admitted again
    over: bool = False
    speed: float = 0.0  # tokens per second of all nodes that can be given leaves, when they were looked at last
    draw: Callable[[], str] = _random_bits
    _names: dict[m.SessionId, str] = field(default_factory=dict)  # of nodes, as they were found last

    def by_session(self, session: object) -> Node | None:
        """The node that a message belongs to, if it still takes part."""
        if not isinstance(session, m.SessionId):
            return None
        node = self.nodes.get(self._names.get(session, ""))
        if node is None or node.session != session:
            node = next((node for node in self.nodes.values() if node.session == session and not node.gone), None)
            if len(self._names) >= MOST_NODES:
                self._names.clear()
            if node is not None:
                self._names[session] = node.name
        return node if node is not None and not node.gone else None

    def by_data(self, peer: bytes) -> Node | None:
        """The node whose worker has this data connection, if it still takes part."""
        return next((node for node in self.nodes.values() if node.worker.data == peer and not node.gone), None)

    def by_peer(self, channel: str, peer: bytes) -> Node | None:
        """The node that has this connection, if it still takes part."""
        if channel == DATA:
            return self.by_data(peer)
        return next((node for node in self.nodes.values() if node.control.peer == peer and not node.gone), None)

    def new_session(self) -> m.SessionId:
        """A session that no worker had."""
        return m.SessionId(self.settings.run, self.settings.incarnation, self.draw())

    def room(self) -> bool:
        """Makes room for one more name where there are many: the node that is gone longest is forgotten."""
        if len(self.nodes) >= MOST_NODES:
            gone = [name for name, node in self.nodes.items() if node.gone and name not in self.settings.launched]
            for name in gone[:1]:
                del self.nodes[name]
        return len(self.nodes) < MOST_NODES

    @property
    def hopeless(self) -> MlxdistError | None:
        """The reason when no node can work any more: all that were launched are given up, and no other is there."""
        launched = self.settings.launched
        if not launched or not launched <= self.given_up.keys():
            return None
        return None if any(not node.gone for node in self.nodes.values()) else next(iter(self.given_up.values()))

    @property
    def absent(self) -> int:
        """The number of launched nodes that are gone, or have not come yet, and whose supervisors are started again."""
        names = self.settings.launched - self.given_up.keys()
        return sum(name not in self.nodes or self.nodes[name].gone for name in names)

    # ---- being there

    def heard(self, node: Node, now: float, *, busy: bool) -> list[Event]:
        """Notes a message of an admitted supervisor. `busy`: the node has leaves to compute."""
        node.heard(now)
        if node.state is not NodeState.SUSPECT:
            return []
        node.move(NodeEvent.HEARD_AGAIN_BUSY if busy else NodeEvent.HEARD_AGAIN)
        return [news_of(node, "heard again")]

    def on_control(self, node: Node, message: m.Message, leaf: Leaf | None) -> list[Event]:
        """Takes a message of an admitted supervisor, whose worker computes `leaf`.

        Raises WireError for a message that has no place here.
        """
        match message:
            case m.Heartbeat(worker_pid=pid, serving=serving):
                node.swap_bytes, node.heat = message.swap_bytes, message.heat
                if not serving or node.worker.serving is None:
                    node.worker.serving = node.control.heard if serving else None
                return [to_supervisor(node, self._standing(node)), *self._look_at_worker(node, pid, leaf)]
            case m.Log(lines=lines):
                return [NodeNews(node.name, node.state.value, quoted(line, LINE_CHARS), log=True) for line in lines]
            case m.WorkerExit(cause=cause, tail=tail):
                return self._worker_ended(node, sentence(cause), tail, leaf)
            case m.Leave():
                return self.lose(node, NodeEvent.BYE, "left", blame=False)
            case _:
                raise WireError(f"{type(message).__name__} on the control connection")

    def _standing(self, node: Node) -> m.HeartbeatAck:
        """Returns the answer to a heartbeat, with what the node contributes."""
        speed = node.speed.tokens_per_second
        share = min(speed / self.speed, 1.0) if self.speed and node.there else 0.0
        return m.HeartbeatAck(node.session, speed, share, node.peak_bytes)

    def _look_at_worker(self, node: Node, pid: int, leaf: Leaf | None) -> list[Event]:
        """Compares with the worker that a heartbeat names: a WorkerExit or a Restart may have been lost."""
        if pid and node.kill_requested in (pid, UNKNOWN):
            node.kill_requested = pid
            return [to_supervisor(node, m.Restart(node.session, pid))]
        if node.worker.ended:
            return []
        if not pid and node.worker.pid:
            return self._worker_ended(node, "the worker ended", (), leaf)
        node.worker.pid = pid
        return []

    def _worker_ended(self, node: Node, cause: str, tail: tuple[str, ...], leaf: Leaf | None) -> list[Event]:
        if node.worker.ended:  # it was told to, and its leaves were given to others then
            return []
        cause += at_work(cause, leaf, self.settings.spec.segment_size)
        last = "\n".join(f"  | {quoted(line, 1000)}" for line in tail[-TAIL_LINES:])
        with_tail = cause + (f"; its last lines:\n{last}" if last else "")
        if node.state in (NodeState.CONNECTING, NodeState.LOADING, NodeState.FETCHING):
            node.early_exits += 1
        if node.early_exits >= EARLY_EXITS:
            return self.turn_away(node, NodeError(f"{node.name}: {with_tail}"))
        return self.lose(node, NodeEvent.WORKER_EXIT, with_tail if node.early_exits else cause)

    def check(self, node: Node, now: float) -> list[Event]:
        """Looks at a node's heartbeats and its control connection."""
        timing, control = self.settings.timing, node.control
        if node.gone:
            return []
        events: list[Event] = []
        silent = now - control.heard
        if silent > timing.dead_seconds:
            return self.lose(node, NodeEvent.LOST, f"not heard for {silent:.3g} s")
        if control.closed is not None and now - control.closed > timing.return_seconds:
            why = f"its connection stayed closed for {timing.return_seconds:.3g} s"
            return self.lose(node, NodeEvent.LOST, why)
        if (silent > timing.suspect_seconds or control.closed is not None) and node.watched:
            node.move(NodeEvent.SILENT)
            why = "its connection is closed" if control.closed is not None else f"no heartbeat for {silent:.3g} s"
            events = [news_of(node, why)]
        if self.silent(node, now) and now - control.probed > timing.beat_seconds:
            events += self.probe(node, now)
        return events

    def silent(self, node: Node, now: float) -> bool:
        """True after a missed heartbeat."""
        return now - node.control.heard > SILENT_HEARTBEATS * self.settings.timing.beat_seconds

    def probe(self, node: Node, now: float) -> list[Event]:
        """Sends a message that needs no answer: when it cannot be sent, the connection is closed."""
        node.control.probed = now
        return [to_supervisor(node, m.HeartbeatAck(node.session))]

    def unreachable(self, channel: str, peer: bytes, now: float) -> None:
        """Notes that a message could not be sent: that connection is closed."""
        for node in self.nodes.values():
            if node.gone:
                continue
            if channel == CONTROL and node.control.peer == peer and node.control.closed is None:
                node.control.closed = now
            if channel == DATA and node.worker.data == peer and node.worker.data_closed is None:
                node.worker.data_closed = now

    def slept(self, gap: float, asleep: float, now: float) -> list[Event]:
        """Notes that the coordinator did nothing for `gap` seconds, and slept for `asleep` more that `now` leaves out.

        No silence in that time counts. After a sleep every node gets all the time there is to be heard again: its
        connection may have to be made again.
        """

        def later(time: float) -> float:
            return now if asleep else min(time + gap, now)

        for control, worker in ((node.control, node.worker) for node in self.nodes.values()):
            control.heard, worker.progressed = later(control.heard), later(worker.progressed)
            worker.heard = later(worker.heard)
            control.closed = None if control.closed is None else later(control.closed)
            worker.data_closed = None if worker.data_closed is None else later(worker.data_closed)
            worker.asked = None if worker.asked is None else later(worker.asked)
        if asleep:
            cause = f"the coordinator's Mac slept for {asleep:.0f} s, or its clock was set"
            return [NodeNews("", "awake", cause, action="its nodes have time to return")]
        if gap > self.settings.timing.suspect_seconds:
            cause = f"the coordinator did nothing for {gap:.3g} s (asleep, or stopped)"
            return [NodeNews("", "awake", cause, action="no node's silence in that time counts")]
        return []

    # ---- going

    def lose(self, node: Node, event: NodeEvent, cause: str, action: str = "", *, blame: bool = True) -> list[Event]:
        """Moves the node to a state without its worker."""
        node.lose_worker(event)
        return [Lost(node, cause, action, blame)]

    def start_again(
        self, node: Node, reason: str, now: float, action: str = "", patience: float | None = None
    ) -> list[Event]:
        """Starts a new session, in which nothing of the old one counts: the worker lost its data connection.

        The supervisor, told that the old session is over, asks for the new one and hands it to the same worker, which
        keeps its model. `patience`: seconds within which the worker is to take it up.
        """
        over = to_supervisor(node, m.Stale(node.session, reason, over=True))
        events = self.lose(node, NodeEvent.CONNECTION_LOST, reason, action, blame=False)
        node.start_session(self.new_session(), now, patience)
        return [*events, over]

    def cut_off(self, node: Node, reason: str) -> list[Event]:
        """Ends the node's session. It may register again."""
        over = to_supervisor(node, m.Stale(node.session, reason, over=True))
        return [*self.lose(node, NodeEvent.LOST, reason, "its session is over", blame=False), over]

    def wrong_answer(self, node: Node, cause: str, now: float) -> list[Event]:
        """Has the worker of a node that gave a wrong answer restarted; where that did not help, puts the node out.

        The leaf in work is not to blame.
        """
        node.wrong_answers = (*(time for time in node.wrong_answers if now - time < HOUR), now)
        if len(node.wrong_answers) <= MOST_RESTARTS:
            return self.restart_worker(node, cause, blame=False)
        why = f"its worker was restarted {MOST_RESTARTS} times within an hour for wrong answers, and gave another one"
        return self.quarantine(node, f"{why} ({cause}). Run `mlxdist selfcheck` there before it takes part again")

    def restart_worker(self, node: Node, reason: str, *, blame: bool = True) -> list[Event]:
        """Has the supervisor start another worker: this one is of no use."""
        # A new session may have the worker of the one before, and its supervisor may not have taken it up yet.
        node.kill_requested = node.worker.pid or node.lost_pid or UNKNOWN
        restart = to_supervisor(node, m.Restart(node.session, node.worker.pid))
        if node.worker.ended:
            return [restart]
        return [restart, *self.lose(node, NodeEvent.WORKER_EXIT, reason, "its worker is restarted", blame=blame)]

    def turn_away(self, node: Node, error: MlxdistError) -> list[Event]:
        """Tells the node the reason why it cannot take part; the others go on."""
        peers = ((DATA, node.worker.data), (CONTROL, node.control.peer))
        rejects = [Send(channel, peer, m.Reject(str(error))) for channel, peer in peers if peer is not None]
        self.given_up[node.name] = error
        return [*rejects, *self.lose(node, NodeEvent.BYE, f"turned away: {error}", blame=False)]

    def quarantine(self, node: Node, reason: str) -> list[Event]:
        """Turns the node away for the rest of the run: its numbers are wrong."""
        self.quarantined[node.name] = reason
        return self.turn_away(node, NodeError(reason))

    def supervisor_ended(self, name: str, error: MlxdistError, final: bool) -> list[Event]:
        """Notes that a supervisor that the coordinator had started has ended; `final`: it is not started again."""
        if final:
            self.given_up.setdefault(name, error)
        node, cause = self.nodes.get(name), str(error).removeprefix(f"{name}: ")
        if node is not None and not node.gone:
            return self.lose(node, NodeEvent.LOST, cause)
        state = node.state.value if node is not None else "not started"
        return [NodeNews(name, state, cause, action="" if final else "it is tried again")]
