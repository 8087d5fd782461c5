"""What the cluster is told once: the run, and the constants of its dealings with nodes; and what it tells of a node."""

from dataclasses import dataclass, field

from mlxdist.coordinator.memory.node_memory import NodeMemory
from mlxdist.protocol.messages import RunSpec
from mlxdist.protocol.tree import Span


@dataclass(frozen=True)
class Rules:
    """The run and its constants, all times in seconds: see [timing] of the configuration."""

    run: str
    incarnation: int
    spec: RunSpec
    versions: dict[str, str]
    data_port: int
    beat_seconds: float
    suspect_seconds: float
    dead_seconds: float
    return_seconds: float = 5.0
    restart_seconds: float = 1.0
    progress_seconds: float = 30.0
    progress_factor: float = 10.0
    first_seconds: float = 600.0
    copy_factor: float = 2.0
    min_nodes: int = 1
    launched: frozenset[str] = frozenset()  # the nodes that the coordinator itself starts
    memory: NodeMemory = field(default_factory=NodeMemory)


@dataclass(frozen=True)
class NodeNews:
    """Something about a node, or of the run itself (no name), that a person may want to read.

    A `log` line is one that its worker printed.
    """

    name: str
    state: str
    cause: str  # what happened
    log: bool = False
    action: str = ""  # what is done about it
    leaves: tuple[Span, ...] = ()  # which are taken from the node and given to others, by their index in the step
    seconds: float = 0.0  # what the end of a pause says: how long it was

    @property
    def message(self) -> str:
        """Cause and action in one line."""
        return "; ".join(part for part in (self.cause, self.action) if part)
