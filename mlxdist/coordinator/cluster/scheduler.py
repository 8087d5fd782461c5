"""The round in work: who computes which leaves, what is late, what is lost. No messages, no clock."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mlxdist.coordinator.cluster.node import Node
from mlxdist.coordinator.cluster.placement import ALONE_AFTER, Assigner, Placement, copies, place, too_slow
from mlxdist.coordinator.cluster.settings import Rules
from mlxdist.coordinator.schedule.assign import NodeSeconds, assign
from mlxdist.coordinator.schedule.deadlines import Deadlines
from mlxdist.coordinator.schedule.node_speeds import Pacing
from mlxdist.coordinator.schedule.rounds import Assignment, Request, Round, begin_round, joined_spans, leaf_tokens
from mlxdist.protocol.errors import MlxdistError, NodeError, NonFiniteError
from mlxdist.protocol.tree import Span

FATAL_CRASHES = ALONE_AFTER + 1
FATAL_NONFINITE = 2
MOST_FALSE_ALARMS = 3  # of a leaf: one that silences every node for a while must not go round for ever
TRIED_AGAIN = 20  # steps after which a node that was left out is measured anew, each time
TRIED_SOON = (2, 4, 8)  # and at first: what left it out may have been noise
TOLD_AFTER = 3  # steps without a node, until it is said


@dataclass
class Scheduler:
    """One round after another. `failure` is what no other node could mend."""

    rules: Rules
    assigner: Assigner = assign
    round: Round | None = None
    failure: MlxdistError | None = None
    leaves_recomputed: int = 0  # of the rounds before
    paused: bool = False
    spare: dict[str, int] = field(default_factory=dict)  # nodes that the last steps left out: in how many
    left_out: deque[tuple[str, str]] = field(default_factory=deque)  # who costs more than it brings, and why
    _told: set[str] = field(default_factory=set)  # who costs more than it brings
    pacing: Pacing = field(default_factory=Pacing)
    _seconds: dict[str, NodeSeconds] = field(default_factory=dict)
    _attempts: int = 0
    deadlines: Deadlines = field(init=False)

    def __post_init__(self) -> None:
        rules = self.rules
        self.deadlines = Deadlines(rules.progress_seconds, rules.progress_factor, rules.first_seconds)

    def begin(self, request: Request) -> Round:
        """The next round: all of it is pending."""
        assert self.round is None or self.round.complete, "one round at a time"
        if self.round is not None:
            self.leaves_recomputed += self.round.recomputed
        self.round = begin_round(self.round, request)
        return self.round

    def forget_step(self) -> None:
        """What was done of the step does not count: its rounds begin anew."""
        assert self.round is not None
        assert self.round.complete
        self.leaves_recomputed += self.round.recomputed + len(self.round.request.leaves)
        self.round = None

    def place(self, nodes: Sequence[Node], there: int, now: float) -> Iterator[Assignment]:
        """Give what is pending to the nodes that can work, unless those that are `there` are too few."""
        if self.round is None or not self.round.pending:
            return
        self.paused = there < self.rules.min_nodes
        if self.paused or not nodes:
            return
        request = self.round.request
        gradient = request.verb == "gradient" and request.only is None
        whole = gradient and self.round.pending == [Span(0, len(request.leaves))]
        speeds = {node.name: node.speed for node in nodes}
        here = [node.name for node in nodes if node.adapter_here == request.adapter_version]
        self._seconds = self.pacing.seconds(request.verb, request.leaf_sizes, speeds, here)
        yield from [
            self._give(placement, nodes, now)
            for placement in list(place(self.round, nodes, self._seconds, self.assigner))
        ]
        if whole and not self.round.pending:
            yield from [self._give(placement, nodes, now) for placement in list(self._look_at_spares(nodes))]

    def _look_at_spares(self, nodes: Sequence[Node]) -> Iterator[Placement]:
        """Count and name the nodes that the step does without; now and then one gets a copy, to be measured anew."""
        assert self.round is not None
        names = sorted({assignment.node for assignment in self.round.assignments.values()})
        given = {name: joined_spans(assignment.span for assignment in self.round.of(name))[0] for name in names}
        self.spare = {name: times for name, times in self.spare.items() if name not in given}
        for node in [node for node in nodes if node.name not in given]:
            self.spare[node.name] = self.spare.get(node.name, 0) + 1
            times = self.spare[node.name]
            told = times < TOLD_AFTER or node.name in self._told
            again = times % TRIED_AGAIN == 0 or times in TRIED_SOON
            if (told and not again) or not (why := too_slow(node.name, self._seconds, given)):
                continue
            if not told:
                self._told.add(node.name)
                self.left_out.append((node.name, why))
            if again:
                node.speed.doubt()
                missing = [piece for assignment in self.round.assignments.values() for piece in assignment.missing]
                yield Placement(node.name, min(missing, key=lambda piece: (len(piece), -piece.start)), copy=True)

    def copy_late(self, nodes: Sequence[Node], now: float) -> Iterator[Assignment]:
        """Copies of what takes much longer than its node usually needs."""
        if self.round is None:
            return

        def slow(assignment: Assignment) -> bool:
            allowed = self.rules.beat_seconds + self.rules.copy_factor * assignment.expected
            return assignment.expected > 0 and now - assignment.began > allowed

        yield from [self._give(placement, nodes, now) for placement in list(copies(self.round, nodes, slow))]

    def _give(self, placement: Placement, nodes: Sequence[Node], now: float) -> Assignment:
        assert self.round is not None
        self._attempts += 1
        node = next(node for node in nodes if node.name == placement.node)
        before = self.round.of(node.name)
        if not before:
            node.progressed = now
        assignment = self.round.give(
            self._attempts, placement.node, placement.span, alone=placement.alone, copy=placement.copy
        )
        assignment.began = now
        if node.speed.known and node.name in self._seconds:
            assignment.expected = self._seconds[node.name].of(placement.span) + sum(one.expected for one in before)
        return assignment

    def stuck(self, node: Node, now: float) -> float | None:
        """Seconds for which a node with work has done nothing, when they are too many."""
        assignments = self.round.of(node.name) if self.round is not None else []
        if not assignments and not node.cancelled:
            return None
        leaf = assignments[0].in_work if assignments else None
        idle = now - node.progressed
        if leaf is None or self.round is None:  # its partial travels, or it is to let go of a leaf
            limit = self.deadlines.limit(0, 0, first=True)
        else:
            tokens = leaf_tokens(self.round.request.leaves[leaf])
            limit = self.deadlines.limit(sum(tokens), max(tokens), first=not node.leaves_done)
        return idle if idle > limit else None

    def lost(self, name: str, blame: bool) -> list[Span]:
        """A node's worker is gone: the spans that are pending again. A leaf at its third crash, alone, is a failure.

        `blame`: the leaf in work may be the cause; not so when the node left, or was turned away.
        """
        if self.round is None:
            return []
        spans, assignment = self.round.lost(name)
        self.round.blamed_leaf.pop(name, None)
        leaf = assignment.in_work if assignment is not None and blame else None
        if assignment is None or leaf is None:
            return spans
        self.round.crashes[leaf] += 1
        self.round.blamed_leaf[name] = leaf
        if (
            assignment.alone and self.round.crashes[leaf] >= FATAL_CRASHES
        ):  # beside other work it may be the innocent one
            self.failure = NodeError(
                f"{FATAL_CRASHES} workers ended while they computed {self._leaf(leaf)}, the last one with nothing else "
                "in work: look at the workers' last lines in the logs, and shorten or leave out these rows",
                leaf=leaf,
            )
        return spans

    def survived(self, name: str) -> None:
        """A worker that seemed lost is still there: it was the network, and the leaf that it had is not to blame."""
        leaf = self.round.blamed_leaf.pop(name, None) if self.round is not None else None
        if self.round is not None and leaf is not None and self.round.false_alarms[leaf] < MOST_FALSE_ALARMS:
            self.round.false_alarms[leaf] += 1
            self.round.crashes[leaf] -= 1

    def nonfinite(self, assignment: Assignment, leaf: int) -> str:
        """A leaf gave NaN or Inf: it is computed elsewhere; the same again is a failure. Returns what to say."""
        assert self.round is not None
        nodes = self.round.nonfinite.setdefault(leaf, [])
        nodes.append(assignment.node)
        self.round.drop(assignment)
        self.round.recomputed += 1
        if len(nodes) >= FATAL_NONFINITE:
            self.failure = NonFiniteError(
                f"NaN or Inf in {self._leaf(leaf)}, on {' and on '.join(nodes)}: no step was taken. Look at these "
                "rows, or lower train.learning_rate",
                leaf=leaf,
            )
        return f"NaN or Inf in {self._leaf(leaf)}"

    def _leaf(self, index: int) -> str:
        assert self.round is not None
        ids = dict.fromkeys(str(row.row_id) for row in self.round.request.leaves[index].rows)
        return f"leaf {index} of step {self.round.request.step} (rows {', '.join(ids)})"


def said(spans: Sequence[Span]) -> str:
    """'leaves [3, 5) go to others', or nothing."""
    return f"leaves {', '.join(map(str, spans))} go to others" if spans else ""
