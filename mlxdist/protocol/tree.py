"""The canonical tree: which leaves are added to which, the same for every number of nodes.

The tree over M leaves splits at the largest power of two below M (as RFC 6962 does for hashes): its shape depends on M
alone. A node sums whole subtrees, the coordinator finishes the same tree: every addition happens once, between the
same two operands, wherever it happens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The leaves from `start` up to, not including, `stop`."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


def halves(span: Span) -> tuple[Span, Span]:
    """The two children of a subtree of two leaves or more."""
    middle = span.start + (1 << ((len(span) - 1).bit_length() - 1))
    return Span(span.start, middle), Span(middle, span.stop)


def fold_span(span: Span, item: Callable[[int], T], add: Callable[[T, T], T]) -> T:
    """The sum over one whole subtree, its leaves made one by one by `item(index)`, in order.

    At most ceil(log2(len(span))) + 1 values are alive at a time.
    """
    if len(span) == 1:
        return item(span.start)
    left, right = halves(span)
    sum_left = fold_span(left, item, add)
    return add(sum_left, fold_span(right, item, add))


def left_of_last(span: Span) -> list[Span]:
    """The subtrees that are added to a subtree's last leaf, from the left; the rightmost is added first."""
    lefts = []
    while len(span) > 1:
        left, span = halves(span)
        lefts.append(left)
    return lefts


def fold(items: Sequence[T], add: Callable[[T, T], T]) -> T:
    """Combines one item or more in the order of the canonical tree over them."""
    if not items:
        raise ValueError("fold needs at least one item")
    return fold_span(Span(0, len(items)), items.__getitem__, add)


def subtrees(total: int, span: Span) -> list[Span]:
    """The fewest whole subtrees of the tree over `total` leaves that make up `span`, left to right."""

    def below(subtree: Span) -> Iterator[Span]:
        if span.stop <= subtree.start or subtree.stop <= span.start:
            return
        if span.start <= subtree.start and subtree.stop <= span.stop:
            yield subtree
            return
        left, right = halves(subtree)
        yield from below(left)
        yield from below(right)

    if not 0 <= span.start < span.stop <= total:
        raise ValueError(f"leaves {span} are not within {total} leaves")
    return list(below(Span(0, total)))


def family(total: int, span: Span) -> tuple[Span, Span] | None:
    """The parent and the sibling of a subtree of the tree over `total` leaves; None for the root.

    Raises ValueError when `span` is no subtree of that tree.
    """
    here, above = Span(0, total), None
    while here != span:
        if len(here) <= 1 or not (here.start <= span.start and span.stop <= here.stop):
            raise ValueError(f"{span} is no subtree of the tree over {total} leaves")
        left, right = halves(here)
        inside_left = span.stop <= left.stop
        above = (here, right if inside_left else left)
        here = left if inside_left else right
    return above


@dataclass
class TreeSum(Generic[T]):
    """Finishes the tree over `total` leaves from partials that come in any order, holding as few values as it can.

    `add(left, right)` returns the sum and may write it into `left`.
    """

    total: int
    add: Callable[[T, T], T]
    held: dict[Span, T] = field(default_factory=dict)

    def put(self, span: Span, value: T) -> None:
        """Takes the sum over one subtree. Raises ValueError for another span, or for one that is summed already."""
        relatives = family(self.total, span)
        if any(other.start < span.stop and span.start < other.stop for other in self.held):
            raise ValueError(f"leaves of {span} were already summed")
        while relatives is not None:
            parent, sibling = relatives
            other = self.held.pop(sibling, None)
            if other is None:
                break
            value = self.add(value, other) if span < sibling else self.add(other, value)
            span, relatives = parent, family(self.total, parent)
        self.held[span] = value

    @property
    def done(self) -> bool:
        """True if every leaf is in the sum."""
        return Span(0, self.total) in self.held

    @property
    def result(self) -> T:
        """The sum over all leaves; KeyError before `done`."""
        return self.held[Span(0, self.total)]
