"""One round of work on a step's leaves: what is assigned to which node, what has come back, what is pending.

The round is cut into pieces: whole subtrees for gradients, whose partials travel, and single leaves for scores. Every
missing piece is pending or part of one assignment, or of two when a copy was made; the first result wins.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mlxdist.coordinator.schedule.assignments import Assignment, Assignments
from mlxdist.protocol.errors import StaleError, WireError
from mlxdist.protocol.leaves import Leaf
from mlxdist.protocol.states import STEP_TRANSITIONS, StepEvent, StepState, advance
from mlxdist.protocol.tree import Span, subtrees
from mlxdist.protocol.vectors import Vector

RowOutputs = npt.NDArray[np.float32]  # [rows or pairs of a leaf, columns]


@dataclass(frozen=True)
class Request:
    """A request of the training loop: `verb` gradient | score, on these leaves, with this adapter version and loss.

    `row_inputs`: inputs of the loss by leaf index (reference log-probs, labels); may be empty. `columns`: the names of
    the row outputs that are due; empty: any number of them. `apart`: leaves whose partials come alone. `only`: the
    leaves that are asked for, when not all, and the nodes that each is asked of, by preference.
    """

    verb: str
    step: int
    adapter_version: int
    leaves: tuple[Leaf, ...]
    loss: str = ""  # of a preference method
    parameters: str = "current"
    scalars: Mapping[str, float] = field(default_factory=dict)
    row_inputs: Mapping[int, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    apart: frozenset[int] = frozenset()
    only: Mapping[int, tuple[str, ...]] | None = None

    @property
    def leaf_work(self) -> list[tuple[int, int]]:
        """The work of each leaf, see `leaf_work`."""
        return [leaf_work(leaf) for leaf in self.leaves]

    @property
    def asked(self) -> list[Span]:
        """The leaves that are asked for, in spans."""
        if self.only is None:
            return [Span(0, len(self.leaves))]
        return joined_spans(Span(leaf, leaf + 1) for leaf in self.only)

    def pieces(self, span: Span) -> list[Span]:
        """The pieces of a span that come back one by one: whole subtrees for gradients, leaves for scores."""
        if self.verb == "gradient":
            return [piece for part in parted(span, self.apart) for piece in subtrees(len(self.leaves), part)]
        return [Span(leaf, leaf + 1) for leaf in range(span.start, span.stop)]


def leaf_work(leaf: Leaf) -> tuple[int, int]:
    """The tokens of a leaf, and those of its longest row, by which its speed is known."""
    return leaf.tokens, max(len(row.ids) for row in leaf.rows)


@dataclass
class Round:
    """The state of one request."""

    request: Request
    begun: StepState = StepState.COMPUTING
    pending: list[Span] = field(default_factory=list)  # spans that no node works on, in order
    assignments: Assignments = field(default_factory=Assignments)
    answers: dict[int, RowOutputs] = field(default_factory=dict)
    partials: list[tuple[Span, Vector]] = field(default_factory=list)  # come, not yet fetched by the loop
    senders: dict[Span, str] = field(default_factory=dict)  # whose partial counts
    computed_by: dict[int, str] = field(default_factory=dict)  # whose row outputs count
    crashes: Counter[int] = field(default_factory=Counter)  # of workers, by the leaf that was in work
    blamed_leaf: dict[str, int] = field(default_factory=dict)  # the leaf at which a node was lost last
    false_alarms: Counter[int] = field(default_factory=Counter)  # crashes that were none, by leaf
    nonfinite: dict[int, list[str]] = field(default_factory=dict)  # the nodes on which a leaf gave NaN or Inf
    restarted: set[tuple[int, str]] = field(default_factory=set)  # of these, where the worker was restarted
    recomputed: int = 0  # leaves, for each time that one was computed, or begun, in vain or once more

    @property
    def state(self) -> StepState:
        """The step's state."""
        if not self.complete:
            return self.begun
        return advance(STEP_TRANSITIONS, self.begun, _event(self.request)[1])

    # ---- giving

    def give(self, attempt: int, node: str, span: Span, *, alone: bool = False, copy: bool = False) -> Assignment:
        """Assigns a span to a node: a pending one, or a copy of one that another node works on."""
        if not copy:
            self.pending = [rest for waiting in self.pending for rest in without(waiting, span)]
        assignment = Assignment(attempt, node, span, alone, copy, missing=set(self.request.pieces(span)))
        self.assignments[attempt] = assignment
        return assignment

    def of(self, node: str) -> list[Assignment]:
        """The assignments of a node, in the order in which they were given."""
        return self.assignments.of(node)

    def check(self, name: str, step: int, attempt: int, adapter_version: int, span: Span) -> Assignment:
        """The assignment of an answer.

        Raises StaleError for another step, attempt or version, WireError for work that was not given to the node.
        """
        asked = (self.request.step, self.request.adapter_version)
        if (step, adapter_version) != asked:
            given = f"step {step}, adapter version {adapter_version}"
            raise StaleError(f"an answer to {given}; this is step {asked[0]}, adapter version {asked[1]}")
        mine = self.assignments.get(attempt)
        if mine is None:
            raise StaleError(f"attempt {attempt} is not {name}'s work in step {step}")
        if mine.node != name or not mine.span.start <= span.start < span.stop <= mine.span.stop:
            raise WireError(f"leaves {span} of attempt {attempt} were not given to it")
        return mine

    # ---- what comes back

    def answer(self, assignment: Assignment, leaf: int, row_outputs: RowOutputs) -> list[Assignment]:
        """Keeps a leaf's row outputs; the first ones count. Returns the assignments that are not needed any more.

        Raises WireError for a second answer of the same attempt.
        """
        if leaf in assignment.answered:
            raise WireError(f"leaf {leaf} was answered before")
        assignment.answered.add(leaf)
        self.recomputed += leaf in self.answers
        if leaf not in self.answers:
            self.answers[leaf], self.computed_by[leaf] = row_outputs, assignment.node
        return self._came(Span(leaf, leaf + 1)) if self.request.verb == "score" else []

    def misses(self, attempt: int, span: Span) -> bool:
        """True if this attempt is still to bring this subtree."""
        return attempt in self.assignments and span in self.assignments[attempt].missing

    def partial(self, attempt: int, span: Span, vector: Vector) -> list[Assignment]:
        """Keeps a whole partial.

        Raises StaleError for a subtree that this attempt is not to bring any more, WireError before all of its leaves
        have answered: without these answers the round would not end.
        """
        if not self.misses(attempt, span):
            raise StaleError(f"the partial over {span} is not missing in attempt {attempt}")
        if not self.assignments[attempt].answered.issuperset(range(span.start, span.stop)):
            raise WireError(f"the partial over {span} came before the answers to its leaves")
        self.partials.append((span, vector))
        self.senders[span] = self.assignments[attempt].node
        return self._came(span)

    def _came(self, piece: Span) -> list[Assignment]:
        done = []
        for assignment in list(self.assignments.values()):
            assignment.missing.discard(piece)
            if not assignment.missing:
                del self.assignments[assignment.attempt]
                if assignment.in_work is not None:
                    self.recomputed += 1  # it had begun what another one finished
                    done.append(assignment)
        return done

    # ---- what is lost

    def drop(self, assignment: Assignment) -> list[Span]:
        """Takes an assignment away: what no other node works on is pending again. Returns those spans."""
        self.assignments.pop(assignment.attempt, None)
        others = {piece for other in self.assignments.values() for piece in other.missing}
        left = joined_spans(assignment.missing - others)
        self.pending = joined_spans([*self.pending, *left])
        return left

    def lost(self, name: str) -> tuple[list[Span], Assignment | None]:
        """Takes away what a node had: returns the spans that are pending again, and the assignment that was in work."""
        assignments = self.of(name)
        spans = joined_spans(span for assignment in assignments for span in self.drop(assignment))
        blamed = next((assignment for assignment in assignments if assignment.in_work is not None), None)
        self.recomputed += blamed is not None
        return spans, blamed

    # ---- how it stands

    @property
    def missing(self) -> set[Span]:
        """The pieces that nodes are still to bring."""
        return {piece for assignment in self.assignments.values() for piece in assignment.missing}

    @property
    def lowest_missing(self) -> int:
        """The lowest leaf whose partial has not come."""
        starts = [span.start for assignment in self.assignments.values() for span in assignment.missing]
        return min([*starts, *(span.start for span in self.pending)], default=len(self.request.leaves))

    @property
    def complete(self) -> bool:
        """True if every leaf has answered and every partial has come."""
        asked = sum(map(len, self.request.asked))
        return not self.pending and not self.assignments and len(self.answers) == asked

    def finished(self, name: str) -> bool:
        """True if this node has nothing left to do in the round."""
        return self.assignments.idle(name)

    def in_work(self, name: str) -> Leaf | None:
        """The leaf that this node computes now."""
        indices = [assignment.in_work for assignment in self.of(name)]
        return next((self.request.leaves[index] for index in indices if index is not None), None)

    def outputs_in_row_order(self) -> Sequence[RowOutputs]:
        """The answers of all leaves, by leaf."""
        return [self.answers[index] for index in range(len(self.request.leaves))]


def begin_round(before: Round | None, request: Request) -> Round:
    """The round of a request. Raises ValueError where its step has no place for it, such as a second gradient."""
    state = before.state if before is not None and _goes_on(before.request, request) else StepState.PLANNED
    return Round(request, advance(STEP_TRANSITIONS, state, _event(request)[0]), request.asked)


def _event(request: Request) -> tuple[StepEvent, StepEvent]:
    """The events of the step when the request begins and ends."""
    if request.verb == "score":
        return StepEvent.SCORE_BEGUN, StepEvent.SCORES_IN
    if request.only is not None:
        return StepEvent.AUDIT_BEGUN, StepEvent.AUDIT_IN
    return StepEvent.GRADIENT_BEGUN, StepEvent.PARTIALS_IN


def _goes_on(before: Request, request: Request) -> bool:
    """True if both are of one step. Scores after scores are not: an evaluation asks for them any number of times."""
    same = (before.step, before.adapter_version) == (request.step, request.adapter_version)
    return same and not before.verb == request.verb == "score"


def without(span: Span, hole: Span) -> Iterator[Span]:
    """The parts of a span beside the hole."""
    if hole.stop <= span.start or span.stop <= hole.start:
        yield span
        return
    if span.start < hole.start:
        yield Span(span.start, hole.start)
    if hole.stop < span.stop:
        yield Span(hole.stop, span.stop)


def parted(span: Span, apart: Iterable[int]) -> list[Span]:
    """A span cut so that each of its leaves in `apart` is alone."""
    edges = {span.start, span.stop, *(edge for leaf in apart for edge in (leaf, leaf + 1))}
    inside = sorted(edge for edge in edges if span.start <= edge <= span.stop)
    return [Span(start, stop) for start, stop in pairwise(inside)]


def joined_spans(spans: Iterable[Span]) -> list[Span]:
    """The same leaves in as few spans as possible, in order."""
    joined: list[Span] = []
    for span in sorted(spans):
        if joined and joined[-1].stop == span.start:
            joined[-1] = Span(joined[-1].start, span.stop)
        else:
            joined.append(span)
    return joined
