"""The state tables: what a node and a step may do next, as data. A state moves through `advance`."""

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class NodeState(Enum):
    """A node as the coordinator sees it."""

    CONNECTING = "connecting"  # the supervisor was admitted, no worker yet
    LOADING = "loading"  # a worker loads the model, then answers the canary
    FETCHING = "fetching"  # it has no copy of the model, and gets one from the coordinator
    READY = "ready"
    BUSY = "busy"  # has leaves in work
    SUSPECT = "suspect"  # no heartbeat for a while
    DEAD = "dead"
    LEFT = "left"


class NodeEvent(Enum):
    """The events that move a node's state."""

    WORKER_HELLO = "worker hello"
    MODEL_WANTED = "model wanted"
    MODEL_HERE = "model here"
    CANARY_ANSWERED = "canary answered"
    ASSIGNED = "assigned"
    FINISHED = "finished"
    SILENT = "silent"
    HEARD_AGAIN = "heard again"
    HEARD_AGAIN_BUSY = "heard again, with work"
    LOST = "lost"
    WORKER_EXIT = "worker exit"
    CONNECTION_LOST = "connection lost"
    BYE = "bye"


_N, _V = NodeState, NodeEvent
_WITH_WORKER = (_N.LOADING, _N.FETCHING, _N.READY, _N.BUSY, _N.SUSPECT)

NODE_TRANSITIONS: Mapping[tuple[NodeState, NodeEvent], NodeState] = {
    (_N.CONNECTING, _V.WORKER_HELLO): _N.LOADING,
    (_N.LOADING, _V.MODEL_WANTED): _N.FETCHING,
    (_N.FETCHING, _V.MODEL_HERE): _N.LOADING,
    (_N.LOADING, _V.CANARY_ANSWERED): _N.READY,
    (_N.READY, _V.ASSIGNED): _N.BUSY,
    (_N.BUSY, _V.ASSIGNED): _N.BUSY,
    (_N.BUSY, _V.FINISHED): _N.READY,
    (_N.READY, _V.SILENT): _N.SUSPECT,
    (_N.BUSY, _V.SILENT): _N.SUSPECT,
    (_N.SUSPECT, _V.HEARD_AGAIN): _N.READY,
    (_N.SUSPECT, _V.HEARD_AGAIN_BUSY): _N.BUSY,
    # A worker that lost its connection starts again in a new session: what it had in work is given to others.
    **{(state, _V.CONNECTION_LOST): _N.CONNECTING for state in _WITH_WORKER},
    **{(state, _V.WORKER_EXIT): _N.CONNECTING for state in (_N.CONNECTING, *_WITH_WORKER)},
    **{(state, _V.LOST): _N.DEAD for state in (_N.CONNECTING, *_WITH_WORKER)},
    **{(state, _V.BYE): _N.LEFT for state in NodeState},
}


class StepState(Enum):
    """A step on its way. KTO takes the round of scores first: its reference point needs the whole global batch."""

    PLANNED = "planned"
    SCORING = "scoring"
    SCORED = "scored"
    COMPUTING = "computing"
    SUMMED = "summed"
    AUDITING = "auditing"  # some leaves are computed once more, before the sum is used


class StepEvent(Enum):
    """The events that move a step's state."""

    SCORE_BEGUN = "score begun"
    SCORES_IN = "scores in"
    GRADIENT_BEGUN = "gradient begun"
    PARTIALS_IN = "partials in"
    AUDIT_BEGUN = "audit begun"
    AUDIT_IN = "audit in"


STEP_TRANSITIONS: Mapping[tuple[StepState, StepEvent], StepState] = {
    (StepState.PLANNED, StepEvent.SCORE_BEGUN): StepState.SCORING,
    (StepState.SCORING, StepEvent.SCORES_IN): StepState.SCORED,
    (StepState.PLANNED, StepEvent.GRADIENT_BEGUN): StepState.COMPUTING,
    (StepState.SCORED, StepEvent.GRADIENT_BEGUN): StepState.COMPUTING,
    (StepState.COMPUTING, StepEvent.PARTIALS_IN): StepState.SUMMED,
    (StepState.SUMMED, StepEvent.AUDIT_BEGUN): StepState.AUDITING,
    (StepState.AUDITING, StepEvent.AUDIT_IN): StepState.SUMMED,
}


def advance(table: Mapping[tuple[S, E], S], state: S, event: E) -> S:
    """The state after the event. Raises ValueError for an event that the table does not have in this state."""
    try:
        return table[state, event]
    except KeyError:
        raise ValueError(f"{event.value!r} cannot happen while {state.value!r}") from None
