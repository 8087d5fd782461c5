"""The nodes of a run by name: who they are, how they are, how fast they work."""

from dataclasses import dataclass, field

from mlxdist.coordinator.schedule.node_speeds import Speed
from mlxdist.protocol import states
from mlxdist.protocol.messages import SessionId
from mlxdist.protocol.states import NODE_TRANSITIONS, NodeEvent, NodeState

GONE = (NodeState.DEAD, NodeState.LEFT)


@dataclass
class Node:
    """One node of the roster. `control` and `data` are the transport's names of its two connections. Times: seconds."""

    name: str
    session: SessionId
    control: bytes
    last_beat: float
    data: bytes | None = None
    state: NodeState = NodeState.CONNECTING
    host: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    canary: tuple[str, ...] = ()
    adapter_version: int = -1  # the newest one sent, or on its way
    has_reference: bool = False  # the reference's adapter was sent, or is on its way
    speed: Speed = field(default_factory=Speed)
    adapter_here: int = -1  # the newest adapter that has arrived
    peak_bytes: int = 0
    progressed: float = 0.0  # when the worker last gave a sign of work
    leaves_done: int = 0  # by this worker
    cancelled: set[int] = field(default_factory=set)  # attempts that the worker has not let go of yet
    spoiled: int = 0  # vectors of this worker that came with another hash
    spent: bool = False  # the worker of this life has ended, or is to end: the next one gets a new life
    worker_pid: int = 0
    last_worker_pid: int = 0  # of the worker that it had when it was lost
    condemned: int = 0  # the pid of a worker that the supervisor was told to end
    early_exits: int = 0  # workers in a row that ended before they were ready
    closed: float | None = None  # when the control connection was found closed
    data_closed: float | None = None
    probed: float = 0.0
    rival: float | None = None  # when another supervisor of this name first asked
    beats_since_rival: int = 0

    def move(self, event: NodeEvent) -> None:
        """Go where the table says. Raises ValueError where it says nothing."""
        self.state = states.advance(NODE_TRANSITIONS, self.state, event)

    @property
    def there(self) -> bool:
        """Whether the node can be given leaves, now or as soon as it has let go of one."""
        return self.state in (NodeState.READY, NodeState.BUSY) and self.data_closed is None

    @property
    def works(self) -> bool:
        """Whether the node can be given leaves."""
        return self.there and not self.cancelled

    @property
    def tokens_per_second(self) -> float:
        """Of gradients of all widths; 0 = not measured yet."""
        return self.speed.tokens_per_second

    @property
    def gone(self) -> bool:
        """Whether the node takes no part any more."""
        return self.state in GONE

    def forget_worker(self) -> None:
        """What was known of the worker is over with it."""
        self.data, self.adapter_version, self.adapter_here, self.has_reference = None, -1, -1, False
        self.leaves_done, self.spoiled, self.data_closed = 0, 0, None
        self.cancelled.clear()

    def heard(self, now: float) -> None:
        """A message of the supervisor came."""
        self.last_beat, self.closed = now, None
        self.beats_since_rival += self.rival is not None
