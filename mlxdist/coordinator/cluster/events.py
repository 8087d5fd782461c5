"""Events that the parts of the cluster return: messages to send, news for a person, assignments, losses.

    scheduler, membership, transfers, joining, answers  ->  events  ->  cluster  ->  frames to send, news to tell

The order of events is the order in which they happen: a loss stands before the assignments that follow from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mlxdist.coordinator.cluster.node import Node
from mlxdist.coordinator.cluster.timeline import Mark
from mlxdist.coordinator.schedule.assignments import Assignment
from mlxdist.protocol import messages as m
from mlxdist.protocol.numerics import Promise
from mlxdist.protocol.transport import CONTROL, DATA
from mlxdist.protocol.tree import Span
from mlxdist.protocol.wire import Buffer


@dataclass(frozen=True)
class Send:
    """A message to a peer on one of the two ports."""

    channel: str
    peer: bytes
    message: m.Message
    payload: Buffer = b""


@dataclass(frozen=True)
class NodeNews:
    """News of a node, or of the run itself (no name), for a person.

    A `log` line is one that its worker printed.
    """

    name: str
    state: str
    cause: str  # what happened
    log: bool = False
    action: str = ""  # what is done about it
    leaves: tuple[Span, ...] = ()  # which are taken from the node and given to others, by their index in the step
    seconds: float = 0.0  # how long a pause was, when it ends
    promise: Promise | None = None  # which holds from now on, when it has changed

    @property
    def message(self) -> str:
        """Cause and action in one line."""
        return "; ".join(part for part in (self.cause, self.action) if part)


@dataclass(frozen=True)
class Lost:
    """The node's worker, or the whole node, is gone. `blame`: the leaf in work may be the cause."""

    node: Node
    cause: str
    action: str = ""
    blame: bool = True


@dataclass(frozen=True)
class FalseAlarm:
    """The worker of a node that was lost is still there: the network failed, not the worker."""

    name: str


@dataclass(frozen=True)
class WrongAnswer:
    """The node's worker is to be restarted. `counts`: it is certain that its answer was wrong."""

    node: Node
    cause: str
    counts: bool = True


@dataclass(frozen=True)
class NotNeeded:
    """Another node was faster: the rest of this assignment is cancelled."""

    assignment: Assignment


@dataclass(frozen=True)
class Changed:
    """The message may have changed which nodes can work."""


Event = Send | Changed | NodeNews | Lost | FalseAlarm | WrongAnswer | NotNeeded | Assignment | Mark


def to_worker(node: Node, message: m.Message, payload: Buffer = b"") -> Send:
    """A message on the worker's connection, which is there."""
    assert node.worker.data is not None
    return Send(DATA, node.worker.data, message, payload)


def to_supervisor(node: Node, message: m.Message) -> Send:
    """A message on the supervisor's connection."""
    return Send(CONTROL, node.control.peer, message)


def news_of(node: Node, cause: str, action: str = "", lost: Sequence[Span] = ()) -> NodeNews:
    """News of a node: what happened, what is done about it, and the leaves that go from it to others."""
    moved = f"leaves {', '.join(map(str, lost))} go to others" if lost else ""
    done = "; ".join(part for part in (action, moved) if part)
    return NodeNews(node.name, node.state.value, cause, action=done, leaves=tuple(lost))
