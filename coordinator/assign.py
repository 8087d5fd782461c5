"""Which node gets which leaves: contiguous runs, weighed by measured speed and by what an extra partial costs."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from mlxdist.protocol.tree import Span, subtrees

MAX_UNITS = 48  # split points considered; more leaves are first grouped into whole subtrees


def assign(
    costs: Sequence[float], speeds: Mapping[str, float], partial_seconds: float, run: Span | None = None
) -> dict[str, Span]:
    """Runs of leaves per node, in the order of `speeds`, so that the slowest node is done as early as possible.

    `costs`: tokens per leaf of the whole step. `speeds`: tokens per second per node, all > 0. `run`: the leaves to give
    away, when they are not all. A node that gets nothing is left out. Of equally fast splits one with few partials is
    taken, then one that is even in leaves.
    """
    total, names = len(costs), tuple(speeds)
    run = run or Span(0, total)
    unit = 1
    while -(-len(run) // unit) > MAX_UNITS:
        unit *= 2  # a run of whole power-of-two groups has few subtrees
    edges = [run.start, *range((run.start // unit + 1) * unit, run.stop, unit), run.stop]
    prefix = [0.0]
    for start, stop in pairwise(edges):
        prefix.append(prefix[-1] + sum(costs[start:stop]))

    # best[j]: the least (finish time, partials, leaves squared) of giving the first j units to the nodes so far
    best: list[tuple[float, int, int] | None] = [(0.0, 0, 0)] + [None] * (len(edges) - 1)
    choices: list[list[int]] = []
    for name in names:
        reached: list[tuple[float, int, int] | None] = [None] * len(edges)
        choice = [0] * len(edges)
        for j in range(len(edges)):
            for i in range(j + 1):
                before = best[i]
                if before is None:
                    continue
                pieces = _pieces(total, edges[i], edges[j])
                seconds = (prefix[j] - prefix[i]) / speeds[name] + pieces * partial_seconds
                leaves = edges[j] - edges[i]
                after = (max(before[0], seconds), before[1] + pieces, before[2] + leaves * leaves)
                known = reached[j]
                if known is None or after < known:
                    reached[j], choice[j] = after, i
        best = reached
        choices.append(choice)

    runs: dict[str, Span] = {}
    j = len(edges) - 1
    for name, choice in zip(reversed(names), reversed(choices), strict=True):
        i = choice[j]
        if i < j:
            runs[name] = Span(edges[i], edges[j])
        j = i
    return {name: runs[name] for name in names if name in runs}


@lru_cache(maxsize=65536)
def _pieces(total: int, start: int, stop: int) -> int:
    return len(subtrees(total, Span(start, stop))) if start < stop else 0
