"""Who gets what is pending, and who gets a copy of what is late. Pure: states and times in, gifts out.

A leaf that was in work at two deaths, or that gave NaN, goes alone to one idle node; the other runs go to all by speed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mlxdist.coordinator.assign import NodeSeconds, assign
from mlxdist.coordinator.roster import Node
from mlxdist.coordinator.rounds import Attempt, Round, joined_runs, parted, without
from mlxdist.protocol.tree import Span

ALONE_AFTER = 2  # deaths with the same leaf in work

Split = Callable[[Mapping[str, NodeSeconds]], dict[str, Span]]


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


def share(
    round_: Round, nodes: Sequence[Node], seconds: Mapping[str, NodeSeconds], split: Split = assign
) -> Iterator[Gift]:
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
    request = round_.request
    if request.only is not None:
        yield from _as_asked(runs, request.only, [node.name for node in takers])
        return
    for run in runs:
        if run == Span(0, len(request.leaves)):
            gifts = split({node.name: seconds[node.name] for node in takers})
        else:
            first_idle = sorted(takers, key=lambda node: node not in idle)
            gifts = assign({node.name: _later(round_, node.name, seconds[node.name]) for node in first_idle}, run)
        for name, part in gifts.items():
            yield from (Gift(name, piece) for piece in parted(part, request.apart))


def _later(round_: Round, name: str, seconds: NodeSeconds) -> NodeSeconds:
    """A node that has work begins anything else after it."""
    left = [attempt.unanswered for attempt in round_.of(name)]
    if not left:
        return seconds
    return replace(seconds, start=sum(seconds.leaves[leaf] for leaves in left for leaf in leaves))


def _as_asked(runs: Sequence[Span], only: Mapping[int, Sequence[str]], names: Sequence[str]) -> Iterator[Gift]:
    """Leaves that were asked of certain nodes: each to the first of its own that can work, else to anyone."""
    for leaf in (leaf for run in runs for leaf in range(run.start, run.stop)):
        yield Gift(next((name for name in only[leaf] if name in names), names[0]), Span(leaf, leaf + 1))


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


@dataclass(frozen=True)
class Spare:
    """A node that got nothing of a step, and why: seconds of its cheapest leaf, of its link, and of the whole step."""

    name: str
    leaf: float
    link: float
    step: float

    @property
    def costs_more(self) -> bool:
        """Whether the step would be longer with it. Else the step has too few leaves to be shorter with it."""
        return self.leaf + self.link > self.step

    def sentence(self, tried_again: int) -> str:
        """What a person is told, once."""
        return (
            f"gets no leaves for now: one takes {self.leaf:.2g} s there and its link {self.link:.2g} s more, while the "
            f"others do a whole step in {self.step:.2g} s; it stays as a spare and is tried again every {tried_again} "
            "steps"
        )


def spares(seconds: Mapping[str, NodeSeconds], gifts: Mapping[str, Span]) -> Iterator[Spare]:
    """The nodes that a split of a whole step leaves out."""
    step = max(seconds[name].of(run) for name, run in gifts.items())
    for name, node in seconds.items():
        if name not in gifts:
            yield Spare(name, min(node.leaves), node.start + node.partial, step)
