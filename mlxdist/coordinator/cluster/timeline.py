"""The timeline of a step: what each node did, and when. Marks in, a compact table per node out. No clock.

leaf, copy, audit, score: a leaf was computed   room: a partial waited to be let in   up: it travelled
down: the adapter travelled                     lost: the node was lost at the end    dropped: another was faster
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mlxdist.coordinator.schedule.assignments import Assignment
from mlxdist.coordinator.schedule.rounds import Request
from mlxdist.protocol.tree import Span

Kind = Literal["leaf", "copy", "audit", "score", "room", "up", "down", "lost", "dropped"]
Row = tuple[str, float, float, int, int]  # kind, begin and end in ms after the step's begin, leaves [start, stop)

MOST_MARKS = 20_000  # that are kept until a step ends; beyond it the oldest are left out
MOST_ROWS = 160  # of a step in the file, some 30 bytes each; beyond it neighbors are joined, then short ones left out
NO_LEAVES = Span(0, 0)


@dataclass(frozen=True, slots=True)
class Mark:
    """One stretch of a node's time, in monotonic seconds."""

    node: str
    kind: Kind
    began: float
    ended: float
    span: Span = NO_LEAVES


@dataclass(frozen=True, slots=True)
class NodeWork:
    """A node in one step: its measured speed, the highest memory so far in GB (10^9 bytes), its state, its rows.

    `swap_gb`: of its host's swap, in use now; None: unknown. `heat`: the thermal pressure, as macOS calls it.
    """

    tokens_per_second: float  # of gradients, padding included; 0: not measured
    peak_gb: float
    state: str
    rows: Sequence[Row]
    swap_gb: float | None = None
    heat: str = ""


@dataclass
class Timeline:
    """The marks since the last step was told."""

    _marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=MOST_MARKS))

    def add(self, mark: Mark) -> None:
        """Keeps a mark for the step that ends next."""
        self._marks.append(mark)

    def cut_short(self, name: str, kind: Literal["lost", "dropped"], work: Assignment | None, now: float) -> None:
        """Keeps the mark of what a node did in vain since its last leaf; it may have had no `work`."""
        if work is None:
            self.add(Mark(name, kind, now, now))
            return
        done = max((mark.ended for mark in self._marks if mark.node == name), default=work.began)
        leaf = work.in_work
        span = work.span if leaf is None else Span(leaf, leaf + 1)
        self.add(Mark(name, kind, min(max(done, work.began), now), now, span))

    def take(self, since: float) -> dict[str, list[Row]]:
        """Returns the rows of each node that ended after `since`, the begin of a step, and losses before it.

        The next step begins empty.
        """
        marks = [mark for mark in self._marks if mark.ended >= since or mark.kind == "lost"]
        self._marks.clear()
        found: dict[str, list[Row]] = {}
        for mark in bounded(sorted(marks, key=lambda mark: (mark.node, mark.began, mark.ended))):
            began, ended = (round(1000 * max(time - since, 0.0), 1) for time in (mark.began, mark.ended))
            found.setdefault(mark.node, []).append((mark.kind, began, ended, mark.span.start, mark.span.stop))
        return found


def leaf_mark(request: Request, assignment: Assignment, leaf: int, seconds: float, now: float) -> Mark:
    """Returns the mark of a leaf that has answered `now`; the node says how many seconds it took."""
    kind: Kind = "copy" if assignment.copy else "leaf" if request.only is None else "audit"
    began = max(assignment.began, now - seconds)
    return Mark(assignment.node, "score" if request.verb == "score" else kind, began, now, Span(leaf, leaf + 1))


def bounded(marks: Sequence[Mark], most: int = MOST_ROWS) -> list[Mark]:
    """Returns marks, sorted by node and begin, as at most about `most`: losses stay, the shortest go first."""
    if len(marks) <= most:
        return list(marks)
    joined = list(_joined(marks))
    if len(joined) <= most:
        return joined
    losses = [mark for mark in joined if mark.kind == "lost"][-most:]
    others = [mark for mark in joined if mark.kind != "lost"]
    longest = sorted(others, key=lambda mark: mark.began - mark.ended)[: most - len(losses)]
    return sorted([*losses, *longest], key=lambda mark: (mark.node, mark.began, mark.ended))


def _joined(marks: Iterable[Mark]) -> Iterable[Mark]:
    """Yields the marks, those of adjoining leaves of one node and kind as one."""
    last: dict[tuple[str, str], Mark] = {}
    for mark in marks:
        key = (mark.node, mark.kind)
        before = last.get(key)
        if before is not None and mark.kind != "lost" and before.span.stop == mark.span.start:
            last[key] = Mark(mark.node, mark.kind, before.began, mark.ended, Span(before.span.start, mark.span.stop))
        else:
            if before is not None:
                yield before
            last[key] = mark
    yield from last.values()
