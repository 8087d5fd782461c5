"""Who gets what is pending, and who gets a copy of what is late. Pure: states and a time in, gifts out.

A leaf that was in work at two deaths, or that gave NaN, goes alone to one idle node; the other runs go to all by speed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mlxdist.coordinator.assign import assign
from mlxdist.coordinator.roster import Node, speeds
from mlxdist.coordinator.rounds import Attempt, Round, joined_runs, without
from mlxdist.protocol.tree import Span

PARTIAL_SECONDS = 0.01  # what one more partial per step is taken to cost, until links are measured
ALONE_AFTER = 2  # deaths with the same leaf in work

Split = Callable[[Sequence[float], Mapping[str, float], float], dict[str, Span]]


@dataclass(frozen=True)
class Gift:
    """A run for a node."""

    node: str
    run: Span
    alone: bool = False
    copy: bool = False


def suspicious(round_: Round) -> list[int]:
    """The pending leaves that are to be tried alone."""
    marked = {leaf for leaf, deaths in round_.deaths.items() if deaths >= ALONE_AFTER} | round_.nonfinite.keys()
    return sorted(leaf for leaf in marked if any(run.start <= leaf < run.stop for run in round_.pending))


def share(round_: Round, nodes: Sequence[Node], split: Split = assign) -> Iterator[Gift]:
    """Gifts of what is pending, to nodes that can work. What finds no node now stays pending."""
    idle = [node for node in nodes if round_.finished(node.name)]
    runs = list(round_.pending)
    for leaf in suspicious(round_):
        alone = Span(leaf, leaf + 1)
        runs = [rest for run in runs for rest in without(run, alone)]
        failed = round_.nonfinite.get(leaf, [])
        others = [node for node in nodes if node.name not in failed] or nodes  # one node: once more there
        if taker := next((node for node in idle if node in others), None):
            idle.remove(taker)
            yield Gift(taker.name, alone, alone=True)
            nodes = [node for node in nodes if node is not taker]
    takers = [node for node in nodes if not any(attempt.alone for attempt in round_.of(node.name))]
    if not takers:
        return
    costs, total = round_.request.costs, len(round_.request.leaves)
    for run in runs:
        if run == Span(0, total):
            gifts = split(costs, speeds(takers), PARTIAL_SECONDS)
        else:
            gifts = assign(costs, speeds(sorted(takers, key=lambda node: node not in idle)), PARTIAL_SECONDS, run)
        for name, part in gifts.items():
            yield Gift(name, part)


def copies(round_: Round, nodes: Sequence[Node], slow: Callable[[Attempt], bool]) -> Iterator[Gift]:
    """Copies of what is late, for nodes that have nothing to do; nothing is copied twice."""
    if round_.pending:
        return
    idle = sorted((node for node in nodes if round_.finished(node.name)), key=lambda node: -node.tokens_per_second)
    copied = {piece for attempt in round_.attempts.values() if attempt.copy for piece in attempt.missing}
    for attempt in list(round_.attempts.values()):
        if not idle:
            return
        left = joined_runs(attempt.missing - copied)
        if left and not attempt.copy and not attempt.alone and slow(attempt):
            yield Gift(idle.pop(0).name, left[-1], copy=True)
