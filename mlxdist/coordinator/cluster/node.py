"""The nodes of a run: their state, and what belongs to it: the supervisor's connection, the worker, the speed."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mlxdist.coordinator.schedule.node_speeds import Speed
from mlxdist.protocol import states
from mlxdist.protocol.limits import Heat
from mlxdist.protocol.messages import SessionId
from mlxdist.protocol.states import NODE_TRANSITIONS, NodeEvent, NodeState

GONE = (NodeState.DEAD, NodeState.LEFT)
WORKING = (NodeState.READY, NodeState.BUSY)
LONGER = 2.0  # than the longest wait so far, before a vector on its way counts as stuck
MOST_DOUBLINGS = 6
UNKNOWN = -1  # the pid of a worker that no heartbeat has named yet


@dataclass
class Control:
    """The supervisor's connection. `peer` is the transport's name of it. Times: monotonic seconds."""

    peer: bytes
    heard: float
    closed: float | None = None  # when it was found closed
    probed: float = 0.0
    rival_heartbeats: int | None = None  # since another supervisor of this name asked; None: no other has asked


@dataclass
class Worker:
    """The worker of one session. Nothing of it is kept for the next one."""

    progressed: float = 0.0  # when it last gave a sign of work
    heard: float = 0.0  # when anything came on its data connection
    asked: float | None = None  # when it was asked for a sign there, and nothing has come since
    ended: bool = False  # or is to end: the next worker gets a new session
    pid: int = 0  # 0: the supervisor has reported none
    serving: float | None = None  # since when the supervisor reports that it took up its session
    told: bool = False  # a person knows that it cannot connect
    patience: float | None = None  # seconds for its hello, where it was at work before; None: as for a first one
    data: bytes | None = None  # the transport's name of its connection; None: it has not said hello
    data_closed: float | None = None  # when that connection was found closed
    adapter_version: int = -1  # the newest adapter that was sent, or is on its way
    adapter_here: int = -1  # the newest adapter that has arrived
    has_reference: bool = False  # the reference's adapter was sent, or is on its way
    wanted_model: bool = False  # it has asked for the model's files
    leaves_done: int = 0
    damaged: int = 0  # vectors in a row that arrived with another hash, in either direction
    cancelled: set[int] = field(default_factory=set)  # attempts that it has not let go of yet


@dataclass
class Node:
    """One node by its name."""

    name: str
    session: SessionId
    control: Control
    worker: Worker = field(default_factory=Worker)
    state: NodeState = NodeState.CONNECTING
    host: Mapping[str, str] = field(default_factory=dict)
    canary: tuple[str, ...] = ()
    held_back: bool = False  # of another bit class than the run: a spare, used when nothing else is left
    wrong_answers: tuple[float, ...] = ()  # when its worker was restarted for one, lately
    speed: Speed = field(default_factory=Speed)
    peak_bytes: int = 0
    swap_bytes: int = -1  # of its host's swap, in use; -1: unknown
    heat: Heat = ""
    early_exits: int = 0  # workers in a row that ended before they were ready
    lost_pid: int = 0  # of the worker that it had when it was lost
    kill_requested: int = 0  # the pid of a worker that the supervisor was told to end; UNKNOWN before a heartbeat
    longest_wait: float = 0.0  # seconds between two messages of its workers while vectors travelled
    silences: int = 0  # data connections in a row that fell silent while vectors travelled

    def move(self, event: NodeEvent) -> None:
        """Moves to the state that the table gives. Raises ValueError where it has none."""
        self.state = states.advance(NODE_TRANSITIONS, self.state, event)

    @property
    def connected(self) -> bool:
        """True if the node is ready or at work, with a data connection."""
        return self.state in WORKING and self.worker.data_closed is None

    @property
    def there(self) -> bool:
        """True if the node can be given leaves, now or as soon as it has let go of one."""
        return self.connected and not self.held_back

    @property
    def watched(self) -> bool:
        """True if a silence makes the node suspect: it can be given leaves now, or is a spare."""
        return self.works or (self.held_back and self.connected)

    @property
    def computes(self) -> bool:
        """True if the node is one of those that are given leaves; it may be silent for a moment."""
        return (self.state in WORKING or self.state is NodeState.SUSPECT) and not self.held_back

    @property
    def works(self) -> bool:
        """True if the node can be given leaves now."""
        return self.there and not self.worker.cancelled

    @property
    def gone(self) -> bool:
        """True if the node takes no part any more."""
        return self.state in GONE

    def heard(self, now: float) -> None:
        """Notes that a message of the supervisor came."""
        self.control.heard, self.control.closed = now, None
        if self.control.rival_heartbeats is not None:
            self.control.rival_heartbeats += 1

    def carrying_limit(self, seconds: float) -> float:
        """Returns the seconds that a block of a vector on its way may take: `seconds`, or more on a slow link."""
        return float(max(seconds, LONGER * self.longest_wait) * 2 ** min(self.silences, MOST_DOUBLINGS))

    def heard_data(self, now: float, *, carrying: bool) -> None:
        """Notes that a message of the worker came. `carrying`: vectors were under way."""
        if carrying and self.worker.heard:
            self.longest_wait = max(self.longest_wait, now - self.worker.heard)
        self.worker.heard, self.worker.asked = now, None

    def lose_worker(self, event: NodeEvent) -> None:
        """Moves to the state after `event`, without a worker. Raises ValueError where the table has none."""
        self.move(event)
        self.lost_pid, self.worker = self.worker.pid, Worker(ended=True)

    def start_session(self, session: SessionId, now: float, patience: float | None = None) -> None:
        """Begins a new session: it has a worker of its own, of which nothing is known yet."""
        self.session, self.worker = session, Worker(progressed=now, patience=patience)
        if self.kill_requested == UNKNOWN:
            self.kill_requested = 0


def ready(nodes: Mapping[str, Node]) -> list[Node]:
    """The nodes that can be given leaves, in the order of their names."""
    return [node for _, node in sorted(nodes.items()) if node.works]
