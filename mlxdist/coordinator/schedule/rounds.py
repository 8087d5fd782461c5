"""One round of work on a step's leaves: what was asked of whom, what has come back, what nobody works on. No messages.

The round is cut into pieces: whole subtrees for gradients, whose partials travel, and single leaves for scores. Every
piece that is missing is pending or in the hands of one attempt, or of two when a copy was made; the first result wins.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mlxdist.protocol.errors import StaleError
from mlxdist.protocol.leaves import Leaf
from mlxdist.protocol.states import STEP_TRANSITIONS, StepEvent, StepState, advance
from mlxdist.protocol.tree import Span, subtrees
from mlxdist.protocol.vectors import Vector

RowOutputs = npt.NDArray[np.float32]  # [rows or pairs of a leaf, columns]


@dataclass(frozen=True)
class Request:
    """What the loop asks: `verb` gradient | score, on these leaves, with this adapter version and loss.

    `row_inputs` holds per-leaf inputs of the loss by leaf index (reference log-probs, labels); may be empty. The partials
    of the leaves in `apart` come alone. `only`: not all leaves are asked for, and of which nodes by preference.
    """

    verb: str
    step: int
    adapter_version: int
    leaves: tuple[Leaf, ...]
    loss: str = ""  # of a preference method
    parameters: str = "current"
    scalars: Mapping[str, float] = field(default_factory=dict)
    row_inputs: Mapping[int, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)
    apart: frozenset[int] = frozenset()
    only: Mapping[int, tuple[str, ...]] | None = None

    @property
    def jobs(self) -> list[tuple[int, int]]:
        """Of each leaf: its padded tokens, and the width of its widest row."""
        return [(sum(tokens), max(tokens)) for tokens in map(leaf_tokens, self.leaves)]

    @property
    def asked(self) -> list[Span]:
        """The leaves that are asked for, in runs."""
        if self.only is None:
            return [Span(0, len(self.leaves))]
        return joined_spans(Span(leaf, leaf + 1) for leaf in self.only)

    def pieces(self, run: Span) -> list[Span]:
        """What comes back of a run, one by one: whole subtrees for gradients, leaves for scores."""
        if self.verb == "gradient":
            return [piece for part in parted(run, self.apart) for piece in subtrees(len(self.leaves), part)]
        return [Span(leaf, leaf + 1) for leaf in range(run.start, run.stop)]


def leaf_tokens(leaf: Leaf) -> list[int]:
    """Padded tokens of each row of a leaf."""
    return [leaf.widths[i % len(leaf.widths)] for i in range(len(leaf.rows))]


@dataclass
class Assignment:
    """One assignment: a run of leaves in the hands of one node. `alone`: nothing else is given to the node with it."""

    number: int
    node: str
    run: Span
    alone: bool = False
    copy: bool = False  # of what another attempt works on, too slowly
    began: float = 0.0
    expected: float = 0.0  # seconds, by the node's speed when it was given; 0 where that is not known
    answered: set[int] = field(default_factory=set)
    missing: set[Span] = field(default_factory=set)

    @property
    def in_work(self) -> int | None:
        """The leaf that the node works on (they are done in order); None when all have answered."""
        return next(iter(self.unanswered), None)

    @property
    def unanswered(self) -> list[int]:
        """The leaves that the node has still to compute."""
        return [leaf for leaf in range(self.run.start, self.run.stop) if leaf not in self.answered]


@dataclass
class Round:
    """The state of one request."""

    request: Request
    begun: StepState = StepState.COMPUTING
    pending: list[Span] = field(default_factory=list)  # runs that nobody works on, in order
    attempts: dict[int, Assignment] = field(default_factory=dict)
    answers: dict[int, RowOutputs] = field(default_factory=dict)
    partials: list[tuple[Span, Vector]] = field(default_factory=list)  # come, not yet fetched by the loop
    senders: dict[Span, str] = field(default_factory=dict)  # whose partial counts
    computed_by: dict[int, str] = field(default_factory=dict)  # whose row outputs count
    deaths: Counter[int] = field(default_factory=Counter)  # of workers, by the leaf that was in work
    charged: dict[str, int] = field(default_factory=dict)  # the leaf at which a node was lost last
    acquittals: Counter[int] = field(default_factory=Counter)  # deaths that were none, by leaf
    nonfinite: dict[int, list[str]] = field(default_factory=dict)  # the nodes on which a leaf gave NaN or Inf
    recomputed: int = 0  # leaves, for each time that one was computed, or begun, in vain or once more

    @property
    def state(self) -> StepState:
        """Where the step is on its way."""
        if not self.complete:
            return self.begun
        return advance(STEP_TRANSITIONS, self.begun, _event(self.request)[1])

    # ---- giving

    def give(self, number: int, node: str, run: Span, *, alone: bool = False, copy: bool = False) -> Assignment:
        """Put a run into a node's hands: a pending one, or a copy of one that another node works on."""
        if not copy:
            self.pending = [rest for span in self.pending for rest in without(span, run)]
        attempt = Assignment(number, node, run, alone, copy, missing=set(self.request.pieces(run)))
        self.attempts[number] = attempt
        return attempt

    def of(self, node: str) -> list[Assignment]:
        """What a node has in its hands, in the order in which it was given."""
        return [attempt for attempt in self.attempts.values() if attempt.node == node]

    def check(self, name: str, step: int, attempt: int, adapter_version: int, span: Span) -> Assignment:
        """The attempt of an answer. Raises StaleError when it belongs to another step, attempt, version or node."""
        asked = (self.request.step, self.request.adapter_version)
        if (step, adapter_version) != asked:
            given = f"step {step}, adapter version {adapter_version}"
            raise StaleError(f"an answer to {given}; this is step {asked[0]}, adapter version {asked[1]}")
        mine = self.attempts.get(attempt)
        if mine is None or mine.node != name:
            raise StaleError(f"attempt {attempt} is not {name}'s work in step {step}")
        if not (mine.run.start <= span.start < span.stop <= mine.run.stop):
            raise StaleError(f"leaves {span} are not {name}'s work in step {step}")
        return mine

    # ---- what comes back

    def answer(self, attempt: Assignment, leaf: int, row_outputs: RowOutputs) -> list[Assignment]:
        """Keep a leaf's row outputs; the first ones count. Returns the attempts that nobody needs any more."""
        attempt.answered.add(leaf)
        self.recomputed += leaf in self.answers
        if leaf not in self.answers:
            self.answers[leaf], self.computed_by[leaf] = row_outputs, attempt.node
        return self._came(Span(leaf, leaf + 1)) if self.request.verb == "score" else []

    def misses(self, attempt: int, span: Span) -> bool:
        """Whether this attempt is still to bring this subtree."""
        return attempt in self.attempts and span in self.attempts[attempt].missing

    def partial(self, attempt: int, span: Span, vector: Vector) -> list[Assignment]:
        """Keep a whole partial. Raises StaleError for a subtree that this attempt is not to bring any more."""
        if not self.misses(attempt, span):
            raise StaleError(f"the partial over {span} is not missing in attempt {attempt}")
        self.partials.append((span, vector))
        self.senders[span] = self.attempts[attempt].node
        return self._came(span)

    def _came(self, piece: Span) -> list[Assignment]:
        done = []
        for attempt in list(self.attempts.values()):
            attempt.missing.discard(piece)
            if not attempt.missing:
                del self.attempts[attempt.number]
                if attempt.in_work is not None:
                    self.recomputed += 1  # it had begun what another one finished
                    done.append(attempt)
        return done

    # ---- what is lost

    def drop(self, attempt: Assignment) -> list[Span]:
        """Take an attempt away: what nobody else works on is pending again. Returns those runs."""
        self.attempts.pop(attempt.number, None)
        others = {piece for other in self.attempts.values() for piece in other.missing}
        left = joined_spans(attempt.missing - others)
        self.pending = joined_spans([*self.pending, *left])
        return left

    def lost(self, name: str) -> tuple[list[Span], Assignment | None]:
        """A node's worker is gone: the runs that are pending again, and the attempt whose leaf was in work."""
        attempts = self.of(name)
        runs = joined_spans(run for attempt in attempts for run in self.drop(attempt))
        blamed = next((attempt for attempt in attempts if attempt.in_work is not None), None)
        self.recomputed += blamed is not None
        return runs, blamed

    # ---- how it stands

    @property
    def missing(self) -> set[Span]:
        """The pieces that are in somebody's hands."""
        return {piece for attempt in self.attempts.values() for piece in attempt.missing}

    @property
    def lowest_missing(self) -> int:
        """The lowest leaf whose partial has not come."""
        starts = [span.start for attempt in self.attempts.values() for span in attempt.missing]
        return min([*starts, *(run.start for run in self.pending)], default=len(self.request.leaves))

    @property
    def complete(self) -> bool:
        """Whether every leaf has answered and every partial has come."""
        asked = sum(map(len, self.request.asked))
        return not self.pending and not self.attempts and len(self.answers) == asked

    def finished(self, name: str) -> bool:
        """Whether this node has nothing left to do in the round."""
        return not self.of(name)

    def in_work(self, name: str) -> Leaf | None:
        """The leaf that this node computes now."""
        indices = [attempt.in_work for attempt in self.of(name)]
        return next((self.request.leaves[index] for index in indices if index is not None), None)

    def outputs_in_row_order(self) -> Sequence[RowOutputs]:
        """The answers of all leaves, by leaf."""
        return [self.answers[index] for index in range(len(self.request.leaves))]


def begin_round(before: Round | None, request: Request) -> Round:
    """The round of a request. Raises ValueError where its step has no place for it, such as a second gradient."""
    state = before.state if before is not None and _goes_on(before.request, request) else StepState.PLANNED
    return Round(request, advance(STEP_TRANSITIONS, state, _event(request)[0]), request.asked)


def _event(request: Request) -> tuple[StepEvent, StepEvent]:
    """What its begin and its end are to the step."""
    if request.verb == "score":
        return StepEvent.SCORE_BEGUN, StepEvent.SCORES_IN
    if request.only is not None:
        return StepEvent.AUDIT_BEGUN, StepEvent.AUDIT_IN
    return StepEvent.GRADIENT_BEGUN, StepEvent.PARTIALS_IN


def _goes_on(before: Request, request: Request) -> bool:
    """Whether both are of one step. Scores after scores are not: so asks an evaluation, as often as it likes."""
    same = (before.step, before.adapter_version) == (request.step, request.adapter_version)
    return same and not before.verb == request.verb == "score"


def without(span: Span, hole: Span) -> Iterator[Span]:
    """What is left of a span beside the hole."""
    if hole.stop <= span.start or span.stop <= hole.start:
        yield span
        return
    if span.start < hole.start:
        yield Span(span.start, hole.start)
    if hole.stop < span.stop:
        yield Span(hole.stop, span.stop)


def parted(run: Span, apart: Iterable[int]) -> list[Span]:
    """A run cut so that each of its leaves in `apart` is alone."""
    edges = {run.start, run.stop, *(edge for leaf in apart for edge in (leaf, leaf + 1))}
    inside = sorted(edge for edge in edges if run.start <= edge <= run.stop)
    return [Span(start, stop) for start, stop in pairwise(inside)]


def joined_spans(spans: Iterable[Span]) -> list[Span]:
    """The same leaves in as few runs as they make, in order."""
    runs: list[Span] = []
    for span in sorted(spans):
        if runs and runs[-1].stop == span.start:
            runs[-1] = Span(runs[-1].start, span.stop)
        else:
            runs.append(span)
    return runs
