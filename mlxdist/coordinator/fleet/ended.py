"""Events of the processes that the coordinator has started, for the fleet: one has ended, or has printed a line."""

from dataclasses import dataclass

from mlxdist.protocol.errors import NodeError


@dataclass(frozen=True)
class Ended:
    """A supervisor that has ended without being asked to; `final`: the run does not wait for it any more."""

    name: str
    error: NodeError
    final: bool


@dataclass(frozen=True)
class Printed:
    """A line that a supervisor, or the ssh that carries it, has printed."""

    name: str
    line: str
