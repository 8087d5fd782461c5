"""One round of work on a step's leaves: what was asked of whom, and what has come back. Values only, no messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mlxdist.protocol.errors import StaleError
from mlxdist.protocol.leaves import Leaf
from mlxdist.protocol.states import STEP_TRANSITIONS, StepEvent, StepState, advance
from mlxdist.protocol.tree import Span, subtrees
from mlxdist.protocol.vectors import Vector

RowNumbers = npt.NDArray[np.float32]  # [rows or pairs of a leaf, columns]


@dataclass(frozen=True)
class Request:
    """What the loop asks: `verb` gradient | score, on these leaves, with this adapter version and loss.

    `numbers` holds per-leaf inputs of the loss by leaf index (reference log-probs, labels); may be empty.
    """

    verb: str
    step: int
    adapter_version: int
    leaves: tuple[Leaf, ...]
    loss: str = "sft"
    parameters: str = "current"
    scalars: Mapping[str, float] = field(default_factory=dict)
    numbers: Mapping[int, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)

    @property
    def costs(self) -> list[float]:
        """Padded tokens per leaf."""
        return [float(sum(leaf_tokens(leaf))) for leaf in self.leaves]


def leaf_tokens(leaf: Leaf) -> list[int]:
    """Padded tokens of each row of a leaf."""
    return [leaf.widths[i % len(leaf.widths)] for i in range(len(leaf.rows))]


@dataclass
class Round:
    """The state of one request: who works on which run, and what is still missing."""

    request: Request
    attempt: int
    assignment: Mapping[str, Span]
    begun: StepState = StepState.COMPUTING
    answers: dict[int, RowNumbers] = field(default_factory=dict)
    missing: set[Span] = field(default_factory=set)  # subtrees whose partial has not come
    partials: list[tuple[Span, Vector]] = field(default_factory=list)  # come, not yet fetched by the loop

    def __post_init__(self) -> None:
        if self.request.verb == "gradient":
            total = len(self.request.leaves)
            self.missing = {span for run in self.assignment.values() for span in subtrees(total, run)}

    @property
    def state(self) -> StepState:
        """Where the step is on its way."""
        if not self.complete:
            return self.begun
        event = StepEvent.SCORES_IN if self.request.verb == "score" else StepEvent.PARTIALS_IN
        return advance(STEP_TRANSITIONS, self.begun, event)

    def check(self, name: str, step: int, attempt: int, adapter_version: int, span: Span) -> None:
        """Raise StaleError when an answer belongs to another step, attempt, adapter version or node."""
        asked = (self.request.step, self.attempt, self.request.adapter_version)
        if (step, attempt, adapter_version) != asked:
            given = f"step {step}, attempt {attempt}, adapter version {adapter_version}"
            raise StaleError(f"an answer to {given}; this is step {asked[0]}, attempt {asked[1]}, version {asked[2]}")
        run = self.assignment.get(name)
        if run is None or not (run.start <= span.start < span.stop <= run.stop):
            raise StaleError(f"leaves {span} are not {name}'s work in step {step}")

    def answer(self, leaf: int, numbers: RowNumbers) -> None:
        """Keep a leaf's row numbers; the first ones count."""
        self.answers.setdefault(leaf, numbers)

    def partial(self, span: Span, vector: Vector) -> None:
        """Keep a whole partial. Raises StaleError for a subtree that is not missing."""
        if span not in self.missing:
            raise StaleError(f"the partial over {span} was not missing")
        self.missing.remove(span)
        self.partials.append((span, vector))

    @property
    def lowest_missing(self) -> int:
        """The lowest leaf whose partial has not come."""
        return min((span.start for span in self.missing), default=len(self.request.leaves))

    @property
    def complete(self) -> bool:
        """Whether every leaf has answered and every partial has come."""
        return not self.missing and len(self.answers) == len(self.request.leaves)

    def finished(self, name: str) -> bool:
        """Whether this node has nothing left to do in the round."""
        run = self.assignment.get(name)
        if run is None:
            return True
        return all(leaf in self.answers for leaf in range(run.start, run.stop)) and not any(
            run.start <= span.start < run.stop for span in self.missing
        )

    def in_work(self, name: str) -> Leaf | None:
        """The leaf that this node computes now: the first of its run without an answer."""
        run = self.assignment.get(name, Span(0, 0))
        return next((self.request.leaves[i] for i in range(run.start, run.stop) if i not in self.answers), None)

    def numbers_in_row_order(self) -> Sequence[RowNumbers]:
        """The answers of all leaves, by leaf."""
        return [self.answers[index] for index in range(len(self.request.leaves))]


def begin_round(before: Round | None, request: Request, attempt: int, assignment: Mapping[str, Span]) -> Round:
    """The round of a request. Raises ValueError where its step has no place for it, such as a second gradient."""
    state = before.state if before is not None and _goes_on(before.request, request) else StepState.PLANNED
    event = StepEvent.SCORE_BEGUN if request.verb == "score" else StepEvent.GRADIENT_BEGUN
    return Round(request, attempt, assignment, advance(STEP_TRANSITIONS, state, event))


def _goes_on(before: Request, request: Request) -> bool:
    """Whether both are of one step. Scores after scores are not: so asks an evaluation, as often as it likes."""
    same = (before.step, before.adapter_version) == (request.step, request.adapter_version)
    return same and not before.verb == request.verb == "score"
