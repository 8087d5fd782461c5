"""Estimates of a step on several nodes: its partials, traffic and time, and the number of nodes that is worthwhile."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from mlxdist.coordinator.config.schema import BatchConfig
from mlxdist.coordinator.report.history import events
from mlxdist.coordinator.schedule.assign import NodeSeconds, assign
from mlxdist.protocol.tree import Span, subtrees

WORTH = 0.95  # another node is worthwhile when a step then takes at most this share of the time
MOST_NODES = 64  # the largest number of nodes that is tried


@dataclass(frozen=True, slots=True)
class Traffic:
    """The network traffic of one step at the coordinator: the adapter to every node, the partial gradients back."""

    partials: int
    bytes_down: int
    bytes_up: int
    seconds: float


def spread(
    costs: Sequence[float], nodes: int, tokens_per_second: float = 1.0, partial_seconds: float = 0.0
) -> list[Span]:
    """Returns the span of leaves, of `costs` tokens, of each equally fast node; a node that gets none is left out."""
    node = NodeSeconds([tokens / tokens_per_second for tokens in costs], partial_seconds)
    return list(assign({str(number): node for number in range(nodes)}).values())


def traffic(
    costs: Sequence[float], nodes: int, vector_bytes: int, bytes_per_second: float, tokens_per_second: float = 1.0
) -> Traffic:
    """Returns what a step with leaves of `costs` tokens sends over a link of this rate: first down, then up."""
    spans = spread(costs, nodes, tokens_per_second, vector_bytes / bytes_per_second)
    partials = sum(len(subtrees(len(costs), span)) for span in spans)
    down, up = nodes * vector_bytes, partials * vector_bytes
    return Traffic(partials, down, up, (down + up) / bytes_per_second)


def step_seconds(costs: Sequence[float], nodes: int, tokens_per_second: float, sent: Traffic) -> float:
    """Returns the seconds of a step: the leaves of the slowest node, then the traffic, which do not overlap here."""
    partial_seconds = sent.seconds / (nodes + sent.partials)
    spans = spread(costs, nodes, tokens_per_second, partial_seconds)
    slowest = max(sum(costs[span.start : span.stop]) for span in spans)
    return slowest / tokens_per_second + sent.seconds


def useful_nodes(costs: Sequence[float], tokens_per_second: float, vector_bytes: int, bytes_per_second: float) -> int:
    """Returns the largest number of equal nodes that is worthwhile: a step takes at most 95 % of the time with fewer.

    Ten leaves take as long on six to nine nodes as on five, so larger numbers are tried after one that does not help.
    """
    best, useful = float("inf"), 1
    for nodes in range(1, min(len(costs), MOST_NODES) + 1):
        sent = traffic(costs, nodes, vector_bytes, bytes_per_second, tokens_per_second)
        seconds = step_seconds(costs, nodes, tokens_per_second, sent)
        if seconds <= WORTH * best:
            best, useful = seconds, nodes
    return useful


def busy_nodes(leaves: int, nodes: int) -> int:
    """Returns how many of equally fast nodes get any of so many equal leaves: 2 of 3 nodes share 4 leaves."""
    return len(spread([1.0] * leaves, nodes))


def usual_leaves(batch: BatchConfig, tokens: int) -> int:
    """Returns the leaves of a usual step, whose windows have `tokens` tokens. batch.leaf_tokens is a number."""
    assert batch.leaf_tokens != "auto"
    items = batch.size * batch.grad_accum_steps
    return max(min(-(-tokens * batch.grad_accum_steps // batch.leaf_tokens), items), 1)


def values_for_all(batch: BatchConfig, tokens: int, nodes: int) -> str:
    """Returns the settings, each of which alone gives each of equally fast nodes leaves. `tokens`: of a usual window.

    A step of nodes * 2**k leaves, and one partial from each node, is the least traffic.
    """
    smaller = replace(batch, leaf_tokens=max(tokens * batch.grad_accum_steps // nodes, 1))
    values = [f"batch.size = {size_for_all(batch, tokens, nodes)}"]
    if busy_nodes(usual_leaves(smaller, tokens), nodes) == nodes:
        values.insert(0, f"batch.leaf_tokens = {smaller.leaf_tokens}")
    return " or ".join(values)


def size_for_all(batch: BatchConfig, tokens: int, nodes: int) -> int:
    """Returns a `batch.size`, leaf by leaf from the run's upward, at which each of equally fast nodes gets leaves.

    `tokens`: of a usual window of the run's size.
    """
    leaf_tokens = batch.leaf_tokens
    assert leaf_tokens != "auto"
    size = batch.size
    while busy_nodes(usual_leaves(replace(batch, size=size), tokens * size // batch.size), nodes) < nodes:
        size += max(leaf_tokens * batch.size // max(tokens, 1), 1)  # one leaf more
    return size


def measured_speed(metrics: Path) -> float | None:
    """Returns the tokens per second of one node in the run of the event file `metrics`, or None."""
    speeds, names = list[float](), set[str]()
    try:
        for _, event in events(metrics):
            speed = event.get("all_tokens_per_second")
            if event.get("event") == "train" and isinstance(speed, int | float) and speed > 0:
                speeds.append(speed)
            elif event.get("event") == "node":
                names.add(str(event.get("name")))
    except OSError:
        return None
    return median(speeds) / max(len(names), 1) if speeds else None
