"""Places pending leaves, and copies of late ones, on nodes. Pure: states and times in, placements out.

A leaf that was in work when two workers ended, or that gave NaN, goes alone to one idle node; the other spans go to
all by speed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from mlxdist.coordinator.cluster.node import Node
from mlxdist.coordinator.schedule.assign import NodeSeconds, assign
from mlxdist.coordinator.schedule.assignments import Assignment
from mlxdist.coordinator.schedule.rounds import Round, joined_spans, parted, without
from mlxdist.protocol.tree import Span

ALONE_AFTER = 2  # workers that ended with the same leaf in work

Assigner = Callable[[Mapping[str, NodeSeconds]], dict[str, Span]]


@dataclass(frozen=True)
class Placement:
    """A span of leaves for a node."""

    node: str
    span: Span
    alone: bool = False
    copy: bool = False


def suspicious(round_: Round) -> list[int]:
    """The pending leaves that are to be tried alone."""
    marked = {leaf for leaf, crashes in round_.crashes.items() if crashes >= ALONE_AFTER} | round_.nonfinite.keys()
    return sorted(leaf for leaf in marked if any(span.start <= leaf < span.stop for span in round_.pending))


def place(
    round_: Round, nodes: Sequence[Node], seconds: Mapping[str, NodeSeconds], assigner: Assigner = assign
) -> Iterator[Placement]:
    """Placements of what is pending, to nodes that can work. What finds no node now stays pending."""
    idle = [node for node in nodes if round_.finished(node.name)]
    # One whose partials wait for room has nothing in work, and may wait for the very leaf that is to go alone.
    resting = [node for node in nodes if round_.in_work(node.name) is None]
    spans, able = list(round_.pending), list(nodes)
    for leaf in suspicious(round_):
        alone = Span(leaf, leaf + 1)
        spans = [rest for span in spans for rest in without(span, alone)]
        failed = round_.nonfinite.get(leaf, [])
        others = [node for node in able if node.name not in failed] or able  # one node: once more there
        if taker := next((node for node in sorted(resting, key=lambda node: node not in idle) if node in others), None):
            resting.remove(taker)
            idle = [node for node in idle if node is not taker]
            yield Placement(taker.name, alone, alone=True)
            nodes = [node for node in nodes if node is not taker]
    takers = [node for node in nodes if not any(assignment.alone for assignment in round_.of(node.name))]
    if not takers:
        return
    request = round_.request
    if request.only is not None:
        yield from _as_asked(spans, request.only, [node.name for node in takers])
        return
    for span in spans:
        if span == Span(0, len(request.leaves)):
            placements = assigner({node.name: seconds[node.name] for node in takers})
        else:
            first_idle = sorted(takers, key=lambda node: node not in idle)
            placements = assign({node.name: _later(round_, node.name, seconds[node.name]) for node in first_idle}, span)
        for name, part in placements.items():
            yield from (Placement(name, piece) for piece in parted(part, request.apart))


def _later(round_: Round, name: str, seconds: NodeSeconds) -> NodeSeconds:
    """The node's seconds, counted from the end of the work that it has."""
    left = [assignment.unanswered for assignment in round_.of(name)]
    if not left:
        return seconds
    return replace(seconds, start=sum(seconds.leaves[leaf] for leaves in left for leaf in leaves))


def _as_asked(spans: Sequence[Span], only: Mapping[int, Sequence[str]], names: Sequence[str]) -> Iterator[Placement]:
    """Places leaves that were asked of certain nodes: each on the first of these that can work, else on any other."""
    for leaf in (leaf for span in spans for leaf in range(span.start, span.stop)):
        yield Placement(next((name for name in only[leaf] if name in names), names[0]), Span(leaf, leaf + 1))


def copies(round_: Round, nodes: Sequence[Node], slow: Callable[[Assignment], bool]) -> Iterator[Placement]:
    """Copies of what is late, for nodes that have nothing to do; nothing is copied twice."""
    if round_.pending:
        return
    idle = [node for node in nodes if round_.finished(node.name)]
    idle.sort(key=lambda node: -node.speed.tokens_per_second)
    copied = {piece for assignment in round_.assignments.values() if assignment.copy for piece in assignment.missing}
    for assignment in list(round_.assignments.values()):
        if not idle:
            return
        left = joined_spans(assignment.missing - copied)
        if left and not assignment.copy and not assignment.alone and slow(assignment):
            yield Placement(idle.pop(0).name, left[-1], copy=True)


def too_slow(name: str, seconds: Mapping[str, NodeSeconds], given: Mapping[str, Span]) -> str:
    """The reason why a node that got nothing would slow the step down, with the numbers.

    Empty when one like the slowest of the others would have got nothing either: the step has too few leaves for it.
    """
    mine = seconds[name]
    slowest = max(given, key=lambda other: sum(seconds[other].leaves))
    if mine == seconds[slowest]:  # one like it got nothing
        return ""
    if name not in assign({**seconds, name: seconds[slowest]}):
        return ""
    step = max(seconds[other].of(span) for other, span in given.items())
    here, there = fmean(mine.leaves), fmean(seconds[slowest].leaves)
    return (
        f"slows the step down: a leaf takes {here:.2g} s there, {there:.2g} s on {slowest}, and its "
        f"link {mine.start + mine.partial:.2g} s more; without it a step takes {step:.2g} s"
    )
