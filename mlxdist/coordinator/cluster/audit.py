"""Audits: some leaves are computed on a second node too, and both gradients compared, before the step is taken.

Nodes of one bit class must agree in every bit, others within a tolerance. Where two do not agree, more are asked until
two different nodes do. Pure: answers in, the next question or a finding out; no messages. The fleet asks the questions
and quarantines nodes that were wrong (fleet/fleet.py).
"""

import hashlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from mlxdist.coordinator.schedule.rounds import Request, Round
from mlxdist.protocol.errors import MlxdistError, NodeError
from mlxdist.protocol.vectors import BLOCK_ELEMENTS, Vector, digest

TOLERANCE = 0.1  # of a leaf's gradient, by norm: kernels that round bf16 in another order differ by up to 6e-2
BUCKETS = 4096  # of a sketch, whose error is then about 2 %
TIMES = 2  # that a node is asked for the same leaf

Canaries = Mapping[str, tuple[str, ...]]  # of the nodes that can work


class TaintedError(MlxdistError):
    """A node that took part in the step was quarantined: the step is to be done again, from its first round on."""


@dataclass(frozen=True)
class Answer:
    """A node's answer for one leaf. `rows`: its row outputs; empty where another node's count."""

    node: str
    digest: str
    sketch: npt.NDArray[np.float64]
    rows: bytes = b""


def answer_of(node: str, vector: Vector) -> Answer:
    """A gradient, in a few numbers: the vector itself need not be kept."""
    signs = np.random.default_rng(0)
    sketch = np.zeros(BUCKETS)
    for start in range(0, len(vector), BLOCK_ELEMENTS):
        block = np.zeros(BLOCK_ELEMENTS)
        part = vector[start : start + BLOCK_ELEMENTS]
        block[: len(part)] = part
        sketch += (block * (2.0 * signs.integers(0, 2, BLOCK_ELEMENTS) - 1)).reshape(-1, BUCKETS).sum(axis=0)
    return Answer(node, digest(vector), sketch)


def distance(one: Answer, other: Answer) -> float:
    """About |a - b| / max(|a|, |b|) of two gradients: a count sketch keeps norms."""
    size = max(float(np.linalg.norm(one.sketch)), float(np.linalg.norm(other.sketch)))
    return float(np.linalg.norm(one.sketch - other.sketch)) / size if size else 0.0


def chosen(share: float, seed: int, step: int, leaves: int) -> frozenset[int]:
    """The leaves of a step that are audited: a function of seed and step alone."""
    return frozenset(leaf for leaf in range(leaves) if _draw(f"audit:{seed}:{step}:{leaf}") < share)


def _draw(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


@dataclass(frozen=True)
class Finding:
    """`wrong`: gave wrong numbers. `unlike`: right, but of another bit class than its canary said."""

    wrong: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()
    undecided: bool = False


Alike = Callable[[str, str], bool]  # whether two nodes are of one bit class


def judge(answers: Sequence[Answer], alike: Alike, nodes: Sequence[str]) -> Finding | str:
    """The finding about a leaf, or the node to ask next: one of `nodes`, those that can work.

    Where two nodes do not agree, all are asked, and right is what most agree with. A node that gave another answer is
    asked again: the same bits again, near the right ones, are those of a working node of another class; anything else
    is wrong. Where no two nodes agree, however often they are asked, one that repeats its bits is believed against
    those that do not.
    """

    def agree(one: Answer, other: Answer) -> bool:
        if alike(one.node, other.node):
            return one.digest == other.digest and (one.rows == other.rows or not one.rows or not other.rows)
        return distance(one, other) <= TOLERANCE

    asked = {node: [answer for answer in answers if answer.node == node] for node in (a.node for a in answers)}
    again = [node for node in nodes if 0 < len(asked.get(node, ())) < TIMES]

    def supporters(one: Answer) -> int:
        return len({other.node for other in answers if other.node != one.node and agree(one, other)})

    right = max(answers, key=supporters)
    odd = [node for node, given in asked.items() if not all(agree(right, answer) for answer in given)]
    agreed = supporters(right) > 0
    if agreed and not odd:
        return Finding()
    if ask := next((node for node in nodes if node not in asked), None):
        return ask
    wrong: list[str] = []
    unlike: list[str] = []
    if agreed:
        for node in odd:
            given = asked[node]
            if node in again:
                return node
            near = _repeats(given) and distance(right, given[0]) <= TOLERANCE
            (unlike if near else wrong).append(node)
        return Finding(tuple(wrong), tuple(unlike))
    if len(asked) == 1:
        return Finding()  # no other node is there
    if again:
        return again[0]
    steady = [node for node, given in asked.items() if len(given) >= TIMES and _repeats(given)]
    if len(steady) == 1:
        return Finding(tuple(node for node in asked if node not in steady))
    if len(steady) == len(asked) and all(distance(answers[0], answer) <= TOLERANCE for answer in answers):
        return Finding(unlike=tuple(asked))
    return Finding(undecided=True)


def _repeats(given: Sequence[Answer]) -> bool:
    return len({one.digest for one in given}) == 1 and len({one.rows for one in given if one.rows}) < 2


@dataclass
class Audit:
    """The audits of a run: `share` of its leaves."""

    share: float = 0.0
    seed: int = 0
    audited: int = 0  # leaves, so far
    unlike: set[str] = field(default_factory=set)  # compared within the tolerance from now on
    _turn: int = 0

    def plan(self, request: Request, nodes: int) -> Request:
        """The request with the audited leaves apart; a single node has no other to be compared with."""
        if not self.share or nodes < 2:
            return request
        return replace(request, apart=chosen(self.share, self.seed, request.step, len(request.leaves)))

    def alike(self, canaries: Canaries) -> Alike:
        """The test for two nodes that must agree in every bit."""

        def same_class(one: str, other: str) -> bool:
            known = [canaries.get(one, ()), canaries.get(other, ())]
            return len({*known[0], *known[1]}) == 1 and all(known) and not self.unlike & {one, other}

        return same_class

    def questions(
        self,
        request: Request,
        answers: Mapping[int, Sequence[Answer]],
        canaries: Canaries,
        spare: Container[str] = (),
    ) -> tuple[Request | None, dict[int, Finding]]:
        """The next question, as a request for all open leaves with the nodes to ask; and the findings on the others."""
        alike, only, findings = self.alike(canaries), {}, {}
        for leaf, given in answers.items():
            self._turn += 1
            # Each time another node is the second one; of the first one's class, and no spare one, if there is any.
            names = sorted(canaries)
            turned = names[self._turn % max(len(names), 1) :] + names[: self._turn % max(len(names), 1)]
            next_ = judge(
                given, alike, sorted(turned, key=lambda name: (not alike(given[0].node, name), name in spare))
            )
            if isinstance(next_, Finding):
                findings[leaf] = next_
            else:
                only[leaf] = (next_, *(name for name in turned if name != next_))
        return (replace(request, only=only, apart=frozenset(only)) if only else None), findings

    def conclude(
        self, request: Request, answers: Mapping[int, Sequence[Answer]], findings: Mapping[int, Finding]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """The nodes that were wrong, and those that are newly known to be unlike, each with the reason.

        Where a node was wrong, the step must be done again without it. Raises NodeError where no two nodes agree.
        """
        self.audited += sum(len({answer.node for answer in given}) > 1 for given in answers.values())
        wrong: dict[str, str] = {}
        others: dict[str, str] = {}
        for leaf, finding in findings.items():
            if finding.undecided:
                raise undecided(leaf, request, answers[leaf])
            for name in finding.wrong:
                wrong.setdefault(name, why_wrong(leaf, request, name, answers[leaf]))
            for name in sorted(set(finding.unlike) - self.unlike):
                self.unlike.add(name)
                others[name] = why_unlike(leaf, request, name, answers[leaf])
        return wrong, others


def with_rows(current: Round, leaf: int, answers: Iterable[Answer]) -> list[Answer]:
    """Answers with the leaf's row outputs, where they are of the same node as the gradient."""
    rows, by = current.answers[leaf].tobytes(), current.computed_by[leaf]
    return [replace(answer, rows=rows) if answer.node == by else answer for answer in answers]


def why_wrong(leaf: int, request: Request, node: str, answers: Iterable[Answer]) -> str:
    """The reason why a node is quarantined, with the numbers."""
    answers = list(answers)
    mine = [answer for answer in answers if answer.node == node]
    others = [answer for answer in answers if answer.node != node]
    far = max(distance(one, other) for one in mine for other in others)
    names = " and ".join(sorted({answer.node for answer in others}))
    rows = ", ".join(str(row.row_id) for row in request.leaves[leaf].rows)
    return (
        f"quarantined: its gradient of leaf {leaf} of step {request.step} (rows {rows}) differs from that of {names} "
        f"(relative difference {far:.2g}, asked {len(mine)} times); what it had done of this step is computed again. "
        "Run `mlxdist selfcheck` there before it takes part again"
    )


def why_unlike(leaf: int, request: Request, node: str, answers: Iterable[Answer]) -> str:
    """The reason why the bits depend on which node computes what, although the canaries were the same."""
    answers = list(answers)
    mine = next(answer for answer in answers if answer.node == node)
    far = max(distance(mine, other) for other in answers if other.node != node)
    return (
        f"computes leaf {leaf} of step {request.step} with other last bits than nodes of its bit class (relative "
        f"difference {far:.2g}, the same each time), although its canary gave the same bits"
    )


def undecided(leaf: int, request: Request, answers: Iterable[Answer]) -> NodeError:
    """The error when no two nodes agree."""
    names = " and ".join(sorted({answer.node for answer in answers}))
    rows = ", ".join(str(row.row_id) for row in request.leaves[leaf].rows)
    return NodeError(
        f"{names} do not agree on the gradient of leaf {leaf} of step {request.step} (rows {rows}), and no other node "
        "can say which is right: no step was taken. Run `mlxdist selfcheck` on them and go on with --resume"
    )
