"""The assignments of a round, by attempt and by node: what each node was given, and what it is still to bring."""

from collections.abc import Iterator, MutableMapping, ValuesView
from dataclasses import dataclass, field

from mlxdist.protocol.tree import Span


@dataclass
class Assignment:
    """A span of leaves assigned to one node. `alone`: the node is given nothing else with it."""

    attempt: int
    node: str
    span: Span
    alone: bool = False
    copy: bool = False  # of what another assignment works on, too slowly
    began: float = 0.0
    expected: float = 0.0  # seconds, by the node's speed when it was given; 0 where that is not known
    answered: set[int] = field(default_factory=set)
    missing: set[Span] = field(default_factory=set)
    _first: int = 0  # leaves at the begin of the span that are known to be answered

    @property
    def in_work(self) -> int | None:
        """The leaf that the node works on (they are done in order); None when all have answered."""
        while self._first < len(self.span) and self.span.start + self._first in self.answered:
            self._first += 1  # an answer is never taken back
        return self.span.start + self._first if self._first < len(self.span) else None

    @property
    def unanswered(self) -> list[int]:
        """The leaves that the node has still to compute."""
        return [leaf for leaf in range(self.span.start, self.span.stop) if leaf not in self.answered]


class Assignments(MutableMapping[int, Assignment]):
    """Assignments by attempt, in the order in which they were given. Those of one node are found without a search."""

    def __init__(self) -> None:
        self.changes = 0  # how many were added and removed so far
        self._all: dict[int, Assignment] = {}
        self._of: dict[str, dict[int, Assignment]] = {}

    def of(self, node: str) -> list[Assignment]:
        """The assignments of a node, in the order in which they were given."""
        return list(self._of.get(node, {}).values())

    def idle(self, node: str) -> bool:
        """True if this node has none."""
        return node not in self._of

    def __getitem__(self, attempt: int) -> Assignment:
        return self._all[attempt]

    def __setitem__(self, attempt: int, assignment: Assignment) -> None:
        self.changes += 1
        self._all[attempt] = assignment
        self._of.setdefault(assignment.node, {})[attempt] = assignment

    def __delitem__(self, attempt: int) -> None:
        self.changes += 1
        node = self._all.pop(attempt).node
        del self._of[node][attempt]
        if not self._of[node]:
            del self._of[node]

    def __iter__(self) -> Iterator[int]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def values(self) -> ValuesView[Assignment]:
        """All assignments."""
        return self._all.values()
