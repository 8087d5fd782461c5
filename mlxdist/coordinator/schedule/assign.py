"""Assigns contiguous spans of leaves to nodes by measured times and by the cost of an extra partial."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from mlxdist.protocol.tree import Span, subtrees

MAX_UNITS = 48  # points considered to cut at; more leaves are first grouped into whole subtrees
NODE_UNITS = 4  # or so many for each node, where there are more nodes than a dozen
BISECTIONS = 20


@dataclass(frozen=True)
class NodeSeconds:
    """The seconds that a node would take: for each leaf of the step, per partial, and before its first leaf."""

    leaves: Sequence[float]
    partial: float = 0.0
    start: float = 0.0

    def of(self, span: Span) -> float:
        """The seconds for a span of leaves and the partials over it."""
        return self.start + sum(self.leaves[span.start : span.stop]) + self.partial * _pieces(len(self.leaves), span)


def assign(nodes: Mapping[str, NodeSeconds], span: Span | None = None) -> dict[str, Span]:
    """Spans of leaves per node, in the order of `nodes`, so that the slowest node is done as early as possible.

    `span`: the leaves to assign, when they are not all of the step's. A node that gets nothing is left out. Of equally
    fast assignments one with few partials is taken, then one that is even in leaves.
    """
    total = len(next(iter(nodes.values())).leaves)
    span = span or Span(0, total)
    unit = 1
    while -(-len(span) // unit) > max(MAX_UNITS, NODE_UNITS * len(nodes)):
        unit *= 2  # a span of whole power-of-two groups has few subtrees
    edges = [span.start, *range((span.start // unit + 1) * unit, span.stop, unit), span.stop]
    prefixes = [
        list(accumulate((sum(node.leaves[a:b]) for a, b in pairwise(edges)), initial=0.0)) for node in nodes.values()
    ]
    bound = _reachable(total, edges, list(zip(nodes.values(), prefixes, strict=True)))

    # best[j]: the least (finish time, partials, leaves squared) of giving the first j units to the nodes so far
    best: list[tuple[float, int, int] | None] = [(0.0, 0, 0)] + [None] * (len(edges) - 1)
    choices: list[list[int]] = []
    for node, prefix in zip(nodes.values(), prefixes, strict=True):
        reached: list[tuple[float, int, int] | None] = [None] * len(edges)
        choice = [0] * len(edges)
        for j in range(len(edges)):
            for i in range(j, -1, -1):
                before, known = best[i], reached[j]
                if i < j and node.start + (prefix[j] - prefix[i]) > (known[0] if known is not None else bound):
                    break  # a longer span takes longer still
                if before is None:
                    continue
                after = before
                if i < j:
                    pieces = _pieces(total, Span(edges[i], edges[j]))
                    seconds = node.start + (prefix[j] - prefix[i]) + pieces * node.partial
                    leaves = edges[j] - edges[i]
                    after = (max(before[0], seconds), before[1] + pieces, before[2] + leaves * leaves)
                if known is None or after <= known:
                    reached[j], choice[j] = after, i
        best = reached
        choices.append(choice)

    spans: dict[str, Span] = {}
    j = len(edges) - 1
    assert best[j] is not None
    for name, choice in zip(reversed(list(nodes)), reversed(choices), strict=True):
        i = choice[j]
        if i < j:
            spans[name] = Span(edges[i], edges[j])
        j = i
    return {name: spans[name] for name in nodes if name in spans}


def _reachable(total: int, edges: Sequence[int], nodes: Sequence[tuple[NodeSeconds, Sequence[float]]]) -> float:
    """The seconds of one assignment that is good: no span that takes longer needs to be looked at.

    Each node has its seconds up to each of the `edges` beside it. In turn each takes all that it can do in a time, and
    the least time in which that is everything is found by halving.
    """

    def taken(seconds: float) -> list[int]:
        ends = [0]
        for node, prefix in nodes:
            most = seconds - node.start - node.partial + prefix[ends[-1]]
            ends.append(max(bisect_right(prefix, most) - 1, ends[-1]))
        return ends

    def really(ends: Sequence[int]) -> float:
        return max(
            node.start + (prefix[j] - prefix[i]) + _pieces(total, Span(edges[i], edges[j])) * node.partial
            for (node, prefix), (i, j) in zip(nodes, pairwise(ends), strict=True)
            if i < j
        )

    least, most = 0.0, min(node.start + node.partial + prefix[-1] for node, prefix in nodes)
    while taken(most)[-1] < len(edges) - 1:  # for rounding alone
        most *= 2
    for _ in range(BISECTIONS):
        middle = (least + most) / 2
        least, most = (least, middle) if taken(middle)[-1] == len(edges) - 1 else (middle, most)
    return really(taken(most))


@lru_cache(maxsize=65536)
def _pieces(total: int, span: Span) -> int:
    return len(subtrees(total, span))
