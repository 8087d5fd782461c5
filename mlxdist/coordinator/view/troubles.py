"""The losses of a run: which node, in which step, why, when it was back, and what the step lost by it."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxdist.coordinator.report.goodput import StepTime, lost_seconds
from mlxdist.coordinator.report.node_states import is_loss

MOST = 500  # that are kept, the last ones
NEAR = 200  # steps on each side among which the undisturbed ones are looked for


@dataclass
class Trouble:
    """A node that was lost, silent or turned away."""

    node: str
    state: str
    cause: str
    action: str
    leaves: Sequence[Sequence[int]]  # spans that went to others
    wall: float  # seconds of the run
    step: int | None = None  # in which it happened; None: not known yet
    evaluation: bool = False  # it happened in the evaluation after `step`
    seconds: float | None = None  # that an evaluation was paused for it
    back: float | None = None  # wall seconds when the node was ready again


@dataclass
class Troubles:
    """The troubles in the order in which they were told."""

    all: "deque[Trouble]" = field(default_factory=lambda: deque(maxlen=MOST))
    _states: dict[str, str] = field(default_factory=dict)  # the last state of each node

    def node(self, event: Mapping[str, Any], wall: float) -> None:
        """Takes the news of a node."""
        name, state = event["name"], event["state"]
        before, self._states[name] = self._states.get(name, ""), state
        mine = [trouble for trouble in self.all if trouble.node == name and trouble.back is None]
        if state == "ready":
            for trouble in mine:
                trouble.back = wall
        elif state == "suspect" or is_loss(before, state):
            now = Trouble(name, state, event["cause"], event["action"], event["leaves"], wall)
            if mine and mine[-1].step is None and not now.leaves:  # one thing that is told in two lines
                mine[-1].state = state
                mine[-1].cause = "; ".join(dict.fromkeys([mine[-1].cause, now.cause]))
            else:
                self.all.append(now)

    def stepped(self, step: int) -> None:
        """Notes that a step has ended: what was told since the one before happened in it."""
        self._in(step)

    def evaluated(self, step: int, paused: float) -> None:
        """Notes that the evaluation after a step has ended."""
        for trouble in self._in(step):
            trouble.evaluation, trouble.seconds = True, paused

    def _in(self, step: int) -> list[Trouble]:
        found = [trouble for trouble in self.all if trouble.step is None]
        for trouble in found:
            trouble.step = step
        return found


def cost_of(step: int, times: Mapping[int, StepTime]) -> float | None:
    """Returns the seconds that a step lost against the undisturbed steps around it; None for a step without time."""
    if step not in times:
        return None
    near = [number for number in range(step - NEAR, step + NEAR + 1) if number in times]
    return list(lost_seconds([times[number] for number in near]))[near.index(step)]
