"""The cost of failures: seconds lost against undisturbed steps, and the goodput. Pure: times in, sums out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

NEAREST = 20  # undisturbed steps on each side, against which a disturbed one is measured


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of one finished step. `disturbed`: a node was lost, silent or slow in it, or the run was paused."""

    seconds: float
    tokens: float  # all of the step
    disturbed: bool = False
    leaves_recomputed: int = 0
    seconds_paused: float = 0.0  # of `seconds`


@dataclass(frozen=True, slots=True)
class Redone:
    """The cost of a lost coordinator: steps that were not saved and are done again."""

    steps: int = 0
    seconds: float = 0.0
    leaves: int = 0  # recomputed within them


@dataclass(frozen=True, slots=True)
class LostTime:
    """The sums over all sessions of a run; seconds of the wall clock."""

    leaves_recomputed: int
    steps_disturbed: int
    steps_again: int
    seconds_paused: float
    seconds_lost: float  # the pauses and the steps done again included
    useful_seconds: float
    goodput: float | None  # useful seconds over the wall's; None before any time has passed


def lost_time(steps: Sequence[StepTime], redone: Redone, paused_between: float, wall_seconds: float) -> LostTime:
    """Returns the sums.

    `steps`: those that count, in order; `paused_between`: seconds paused in evaluations; `wall_seconds`: of all
    sessions, whatever they were busy with.
    """
    lost = sum(lost_seconds(steps))
    useful = sum(step.seconds for step in steps) - lost
    return LostTime(
        leaves_recomputed=sum(step.leaves_recomputed for step in steps) + redone.leaves,
        steps_disturbed=sum(step.disturbed for step in steps),
        steps_again=redone.steps,
        seconds_paused=sum(step.seconds_paused for step in steps) + paused_between,
        seconds_lost=lost + redone.seconds + paused_between,
        useful_seconds=useful,
        goodput=min(useful / wall_seconds, 1.0) if wall_seconds > 0 else None,
    )


def lost_seconds(steps: Sequence[StepTime]) -> Iterator[float]:
    """Yields for each step the seconds beyond those that undisturbed steps around it need for as many tokens.

    A pause is lost whole. Where no step was undisturbed nothing else is known to be lost.
    """
    calm = [step.seconds / max(step.tokens, 1) for step in steps if not step.disturbed]
    before = 0  # calm steps before this one
    for step in steps:
        if not step.disturbed:
            before += 1
            yield 0.0
            continue
        near = calm[max(before - NEAREST, 0) : before + NEAREST]
        worked = step.seconds - step.seconds_paused
        usual = median(near) * step.tokens if near else worked
        yield step.seconds_paused + max(worked - usual, 0.0)


@dataclass
class Ledger:
    """The times that are written down while a run goes on, for its sums."""

    times: dict[int, StepTime] = field(default_factory=dict)  # by step
    redone: Redone = field(default_factory=Redone)
    pauses: dict[int, float] = field(default_factory=dict)  # seconds in evaluations, by step
    _leaves_recomputed: int = 0  # up to the last step
    _disturbed: bool = False  # since the last step
    _paused: float = 0.0

    def trouble(self, seconds_paused: float = 0.0) -> None:
        """Notes that something disturbed the step in work."""
        self._disturbed = True
        self._paused += seconds_paused

    def step(self, number: int, seconds: float, tokens: float, leaves_recomputed: int) -> StepTime:
        """Writes down a finished step. `leaves_recomputed`: since the coordinator started."""
        recomputed, self._leaves_recomputed = leaves_recomputed - self._leaves_recomputed, leaves_recomputed
        disturbed = self._disturbed or recomputed > 0
        time = StepTime(seconds, tokens, disturbed, recomputed, min(self._paused, seconds))
        self.times[number] = time
        self._disturbed, self._paused = False, 0.0
        return time

    def evaluation(self, number: int) -> float:
        """Writes down an evaluation after a step. Returns the seconds that were paused in it."""
        paused, self._disturbed, self._paused = self._paused, False, 0.0
        self.pauses[number] = paused
        return paused

    def go_on(self, step: int, before: Mapping[int, StepTime], pauses: Mapping[int, float], redone: Redone) -> Redone:
        """Resumes after `step` of what earlier sessions have done. Returns what of it is done again."""
        self.pauses = {number: seconds for number, seconds in pauses.items() if number <= step}
        self.times = {number: time for number, time in before.items() if number <= step}
        gone = [time for number, time in before.items() if number > step]
        more = Redone(len(gone), sum(time.seconds for time in gone), sum(time.leaves_recomputed for time in gone))
        self.redone = Redone(redone.steps + more.steps, redone.seconds + more.seconds, redone.leaves + more.leaves)
        return more

    def lost_time(self, wall_seconds: float) -> LostTime:
        """Returns the sums so far."""
        steps = [self.times[number] for number in sorted(self.times)]
        return lost_time(steps, self.redone, sum(self.pauses.values()), wall_seconds)
