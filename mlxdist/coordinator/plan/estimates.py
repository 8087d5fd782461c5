"""How a step spreads over nodes: partials, what travels, how long it takes, and how many nodes are worth having."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from mlxdist.coordinator.config.schema import BatchConfig
from mlxdist.coordinator.schedule.assign import NodeSeconds, assign
from mlxdist.protocol.tree import Span, subtrees

WORTH = 0.95  # another node pays when a step then takes at most this part of the time
MOST_NODES = 64  # looked at


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one step sends through the coordinator's network: the adapter to every node, the partials back."""

    partials: int
    bytes_down: int
    bytes_up: int
    seconds: float


def spread(
    costs: Sequence[float], nodes: int, tokens_per_second: float = 1.0, partial_seconds: float = 0.0
) -> list[Span]:
    """The runs of a step's leaves, of `costs` tokens, on equally fast nodes; a node that gets nothing is left out."""
    node = NodeSeconds([tokens / tokens_per_second for tokens in costs], partial_seconds)
    return list(assign({str(number): node for number in range(nodes)}).values())


def traffic(
    costs: Sequence[float], nodes: int, vector_bytes: int, bytes_per_second: float, tokens_per_second: float = 1.0
) -> Traffic:
    """What a step with these leaves sends over a link of this rate, first down, then up."""
    runs = spread(costs, nodes, tokens_per_second, vector_bytes / bytes_per_second)
    partials = sum(len(subtrees(len(costs), run)) for run in runs)
    down, up = nodes * vector_bytes, partials * vector_bytes
    return Traffic(partials, down, up, (down + up) / bytes_per_second)


def step_seconds(costs: Sequence[float], nodes: int, tokens_per_second: float, sent: Traffic) -> float:
    """A step's time: the slowest node's leaves, then what travels. The two do not overlap in this estimate."""
    partial_seconds = sent.seconds / (nodes + sent.partials)
    slowest = max(sum(costs[run.start : run.stop]) for run in spread(costs, nodes, tokens_per_second, partial_seconds))
    return slowest / tokens_per_second + sent.seconds


def useful_nodes(costs: Sequence[float], tokens_per_second: float, vector_bytes: int, bytes_per_second: float) -> int:
    """The number of equal nodes past which another shortens a step by less than a twentieth.

    Ten leaves on five nodes take as long as on six to nine, so the next number that helps is looked for.
    """
    best, useful = float("inf"), 1
    for nodes in range(1, min(len(costs), MOST_NODES) + 1):
        sent = traffic(costs, nodes, vector_bytes, bytes_per_second, tokens_per_second)
        seconds = step_seconds(costs, nodes, tokens_per_second, sent)
        if seconds <= WORTH * best:
            best, useful = seconds, nodes
    return useful


def busy_nodes(leaves: int, nodes: int) -> int:
    """How many of equally fast nodes get any of so many equal leaves: four leaves take two nodes as long as three."""
    return len(spread([1.0] * leaves, nodes))


def size_for_all(batch: BatchConfig, nodes: int) -> int:
    """The smallest `batch.size` from the run's on at which each of equally fast nodes gets leaves."""
    size = batch.size
    while busy_nodes(batch.grad_accum_steps * -(-size // batch.micro_size), nodes) < nodes:
        size = (size // batch.micro_size + 1) * batch.micro_size  # no short leaf
    return size


def nearest_size(batch: BatchConfig, nodes: int) -> int | None:
    """The `batch.size` nearest to the run's at which every node sends one partial a step; None where there is none.

    That is so when the leaves of a step are nodes * 2**k, and always for one node.
    """
    if nodes == 1:
        return batch.size  # the whole tree is one
    full = range(batch.micro_size, batch.size + 2 * nodes * batch.micro_size, batch.micro_size)  # no short leaves
    sizes: list[int] = sorted({*full, batch.size}, key=lambda size: abs(size - batch.size))
    for size in sizes:
        leaves = batch.grad_accum_steps * -(-size // batch.micro_size)
        if leaves % nodes == 0 and (leaves // nodes).bit_count() == 1:
            return size
    return None


def measured_speed(metrics: Path) -> float | None:
    """Tokens per second of one node, padding included, as the run with this event file had; None without one."""
    speeds, names = [], set()
    try:
        with metrics.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                event = json.loads(line)
                if event.get("event") == "train" and event.get("all_tokens_per_second"):
                    speeds.append(float(event["all_tokens_per_second"]))
                elif event.get("event") == "node":
                    names.add(event.get("name"))
    except (OSError, ValueError):
        return None
    return median(speeds) / max(len(names), 1) if speeds else None
