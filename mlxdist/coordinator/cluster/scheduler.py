"""The round in work: which node computes which leaves, what is late, what is lost. No messages, no clock."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlxdist.coordinator.cluster.events import Event, NodeNews, news_of
from mlxdist.coordinator.cluster.node import Node, ready
from mlxdist.coordinator.cluster.nonfinite import leaf_phrase, reported
from mlxdist.coordinator.cluster.placement import ALONE_AFTER, Assigner, Placement, copies, place, too_slow
from mlxdist.coordinator.cluster.settings import ClusterSettings
from mlxdist.coordinator.schedule.assign import NodeSeconds, assign
from mlxdist.coordinator.schedule.assignments import Assignment
from mlxdist.coordinator.schedule.deadlines import Deadlines
from mlxdist.coordinator.schedule.node_speeds import Pacing
from mlxdist.coordinator.schedule.rounds import Request, Round, begin_round, joined_spans, leaf_work
from mlxdist.protocol.errors import MlxdistError, NodeError, StaleError
from mlxdist.protocol.leaves import Leaf
from mlxdist.protocol.tree import Span

FATAL_CRASHES = ALONE_AFTER + 1
MOST_FALSE_ALARMS = 3  # of a leaf: one that silences every node for a while must not go round for ever
TRIED_AGAIN = 20  # steps after which a node that was left out is measured again, each time
TRIED_SOON = (2, 4, 8)  # and at first: what left it out may have been noise
TOLD_AFTER = 3  # steps without a node, until it is said


@dataclass
class Scheduler:
    """The work of one round after another. `failure`: an error that no other node could make good."""

    settings: ClusterSettings
    assigner: Assigner = assign
    round: Round | None = None
    failure: MlxdistError | None = None
    leaves_recomputed: int = 0  # of the rounds before
    paused_at: float | None = None  # since when too few nodes can work
    spare: dict[str, int] = field(default_factory=dict)  # nodes that the last steps left out: in how many
    _told: set[str] = field(default_factory=set)  # nodes of which it was said that they slow the step down
    pacing: Pacing = field(default_factory=Pacing)
    _seconds: dict[str, NodeSeconds] = field(default_factory=dict)
    _attempts: int = 0
    deadlines: Deadlines = field(init=False)

    def __post_init__(self) -> None:
        self.deadlines = Deadlines(self.settings.timing)

    def current(self) -> Round:
        """The round in work, or the last one. Raises StaleError before the first."""
        if self.round is None:
            raise StaleError("no step is in work")
        return self.round

    def busy(self, name: str) -> bool:
        """True if this node has anything to do."""
        return self.round is not None and not self.round.finished(name)

    def in_work(self, name: str) -> Leaf | None:
        """The leaf that this node computes now."""
        return self.round.in_work(name) if self.round is not None else None

    def first_of(self, name: str) -> Assignment | None:
        """The assignment that this node works on, or whose partial it sends."""
        return next(iter(self.round.of(name)), None) if self.round is not None else None

    def begin(self, request: Request) -> Round:
        """Begins the next round: all of it is pending."""
        assert self.round is None or self.round.complete, "one round at a time"
        if self.round is not None:
            self.leaves_recomputed += self.round.recomputed
        self.round = begin_round(self.round, request)
        return self.round

    def forget_step(self) -> None:
        """Forgets what was done of the step: its rounds begin again."""
        assert self.round is not None
        assert self.round.complete
        self.leaves_recomputed += self.round.recomputed + len(self.round.request.leaves)
        self.round = None

    def place(self, nodes: Mapping[str, Node], now: float) -> list[Event]:
        """Gives what is pending to the nodes that can work, unless there are too few nodes: then the run pauses."""
        if self.round is None or not self.round.pending:
            return []
        events = self._pause_or_go_on(sum(node.there for node in nodes.values()), now)
        able = ready(nodes)
        if self.paused_at is not None or not able:
            return events
        request = self.round.request
        gradient = request.verb == "gradient" and request.only is None
        whole = gradient and self.round.pending == [Span(0, len(request.leaves))]
        speeds = {node.name: node.speed for node in able}
        here = [node.name for node in able if node.worker.adapter_here == request.adapter_version]
        self._seconds = self.pacing.seconds(request.verb, request.leaf_work, speeds, here)
        for placement in list(place(self.round, able, self._seconds, self.assigner)):
            events.append(self._give(placement, nodes, now))
        if whole and not self.round.pending:
            events += self._look_at_spares(able, nodes, now)
        return events

    def _pause_or_go_on(self, there: int, now: float) -> list[Event]:
        what = f"{there} of at least {self.settings.min_nodes} nodes can work"
        if there < self.settings.min_nodes and self.paused_at is None:
            self.paused_at = now
            return [NodeNews("", "paused", f"paused: {what}", action="waiting for more")]
        if there >= self.settings.min_nodes and self.paused_at is not None:
            seconds, self.paused_at = now - self.paused_at, None
            return [NodeNews("", "training", f"going on after {seconds:.3g} s: {what}", seconds=seconds)]
        return []

    def _look_at_spares(self, able: Sequence[Node], nodes: Mapping[str, Node], now: float) -> list[Event]:
        """Counts and names the nodes that the step does without; now and then one gets a copy, to be measured again."""
        assert self.round is not None
        names = sorted({assignment.node for assignment in self.round.assignments.values()})
        given = {name: joined_spans(assignment.span for assignment in self.round.of(name))[0] for name in names}
        self.spare = {name: times for name, times in self.spare.items() if name not in given}
        news: list[Event] = []
        copied: list[Event] = []
        for node in [node for node in able if node.name not in given]:
            self.spare[node.name] = self.spare.get(node.name, 0) + 1
            times = self.spare[node.name]
            told = times < TOLD_AFTER or node.name in self._told
            again = times % TRIED_AGAIN == 0 or times in TRIED_SOON
            if (told and not again) or not (why := too_slow(node.name, self._seconds, given)):
                continue
            if not told:
                self._told.add(node.name)
                what = "it gets no leaves for now, stays as a spare"
                news.append(news_of(node, why, f"{what} and is tried again at least every {TRIED_AGAIN} steps"))
            if again:
                node.speed.doubt()
                missing = [piece for assignment in self.round.assignments.values() for piece in assignment.missing]
                piece = min(missing, key=lambda piece: (len(piece), -piece.start))
                copied.append(self._give(Placement(node.name, piece, copy=True), nodes, now))
        return [*copied, *news]

    def copy_late(self, nodes: Mapping[str, Node], now: float) -> list[Event]:
        """Gives copies of what takes much longer than its node usually needs."""
        current, timing = self.round, self.settings.timing
        if current is None:
            return []

        def slow(assignment: Assignment) -> bool:
            allowed = timing.beat_seconds + timing.copy_factor * assignment.expected
            return assignment.expected > 0 and now - assignment.began > allowed

        events: list[Event] = []
        for placement in list(copies(current, ready(nodes), slow)):
            copy = self._give(placement, nodes, now)
            late = next(one for one in current.assignments.values() if not one.copy and one.missing & copy.missing)
            what = f"leaves {copy.span} take long there"
            events += [news_of(nodes[late.node], what, f"{copy.node} computes them too"), copy]
        return events

    def _give(self, placement: Placement, nodes: Mapping[str, Node], now: float) -> Assignment:
        assert self.round is not None
        self._attempts += 1
        node = nodes[placement.node]
        before = self.round.of(node.name)
        if not before:
            node.worker.progressed = now
        assignment = self.round.give(
            self._attempts, node.name, placement.span, alone=placement.alone, copy=placement.copy
        )
        assignment.began = now
        if node.speed.known and node.name in self._seconds:
            assignment.expected = self._seconds[node.name].of(placement.span) + sum(one.expected for one in before)
        return assignment

    def stuck(self, node: Node, now: float) -> float | None:
        """Seconds for which a node with work has done nothing, when they are too many."""
        idle, timing = now - node.worker.progressed, self.settings.timing
        if idle <= min(timing.progress_seconds, timing.start_timeout):  # no patience is shorter
            return None
        assignments = self.round.of(node.name) if self.round is not None else []
        if not assignments and not node.worker.cancelled:
            return None
        return idle if idle > self.patience(node) else None

    def patience(self, node: Node) -> float:
        """Seconds for which a node's worker may do nothing, with the work that it has."""
        assignments = self.round.of(node.name) if self.round is not None else []
        leaf = next((one.in_work for one in assignments if one.in_work is not None), None)
        if not assignments or self.round is None:  # it is to let go of a leaf
            return self.deadlines.limit(0, 0, first=True)
        if leaf is None:  # its partial travels
            return node.carrying_limit(self.settings.timing.progress_seconds)
        work = leaf_work(self.round.request.leaves[leaf])
        return self.deadlines.limit(*work, first=not node.worker.leaves_done)

    def lost(self, name: str, blame: bool) -> list[Span]:
        """Takes back what a node had whose worker is gone; returns the spans that are pending again.

        `blame`: the leaf in work may be the cause; not so when the node left, or was turned away. A leaf at its third
        crash, with nothing else in work, is a failure.
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
        # Beside other leaves it may not be the cause.
        if assignment.alone and self.round.crashes[leaf] >= FATAL_CRASHES:
            self.failure = NodeError(
                f"{FATAL_CRASHES} workers ended while they computed {leaf_phrase(self.round, leaf)}, the last one with "
                "nothing else in work: read the workers' last lines in the logs, and shorten or leave out these rows",
                leaf=leaf,
            )
        return spans

    def false_alarm(self, name: str) -> None:
        """Takes back the blame of the leaf at which a node was lost: its worker is still there, the network failed."""
        leaf = self.round.blamed_leaf.pop(name, None) if self.round is not None else None
        if self.round is not None and leaf is not None and self.round.false_alarms[leaf] < MOST_FALSE_ALARMS:
            self.round.false_alarms[leaf] += 1
            self.round.crashes[leaf] -= 1

    def nonfinite(self, assignment: Assignment, span: Span, nodes: Mapping[str, Node], *, said: bool) -> list[Event]:
        """Has leaves that gave NaN or Inf computed elsewhere (see nonfinite.py), or notes the failure."""
        assert self.round is not None
        events, failure = reported(self.round, assignment, span, nodes, said=said)
        self.failure = self.failure or failure
        return events
