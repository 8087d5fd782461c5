"""Answers of workers about their leaves: row outputs, or NaN and Inf."""

from collections.abc import Mapping

import numpy as np

from mlxdist.coordinator.cluster.events import Event, NotNeeded
from mlxdist.coordinator.cluster.node import Node
from mlxdist.coordinator.cluster.nonfinite import believed, refuted
from mlxdist.coordinator.cluster.plausible import check_sums, row_outputs
from mlxdist.coordinator.cluster.scheduler import Scheduler
from mlxdist.coordinator.cluster.timeline import leaf_mark
from mlxdist.coordinator.schedule.rounds import leaf_work
from mlxdist.protocol import messages as m
from mlxdist.protocol.tree import Span


def leaf_answered(
    node: Node, message: m.LeafAnswer, payload: memoryview, scheduler: Scheduler, nodes: Mapping[str, Node], now: float
) -> list[Event]:
    """Keeps the row outputs of a leaf, and measures its node.

    Raises StaleError for an answer to something else, WireError for one that cannot be right.
    """
    current, span = scheduler.current(), Span(message.leaf, message.leaf + 1)
    assignment = current.check(node.name, message.step, message.attempt, message.adapter_version, span)
    request = current.request
    leaf = request.leaves[message.leaf]
    outputs = row_outputs(request, leaf, message, payload)
    if np.isfinite(outputs).all():
        check_sums(request, leaf, outputs)
    elif request.verb == "gradient":
        return scheduler.nonfinite(assignment, span, nodes, said=False)
    elif not believed(current, span, node.name, nodes):
        # Believed, it is a result for the caller to judge: a validation loss may be infinite, KTO's z0 may not.
        return [*scheduler.nonfinite(assignment, span, nodes, said=True), NotNeeded(assignment)]
    done = current.answer(assignment, message.leaf, outputs)
    node.worker.leaves_done += 1
    node.peak_bytes = max(node.peak_bytes, message.peak_bytes)
    work = leaf_work(leaf)
    scheduler.deadlines.took(*work, message.seconds)
    node.speed.leaf(request.verb, work, message.seconds)
    mark = leaf_mark(request, assignment, message.leaf, message.seconds, now)
    proves = request.verb == "score" and np.isfinite(outputs).all()  # a gradient's proof is its partial
    return [mark, *map(NotNeeded, done), *(refuted(current, span, node.name, nodes) if proves else [])]


def nonfinite_leaf(node: Node, message: m.Fault, scheduler: Scheduler, nodes: Mapping[str, Node]) -> list[Event]:
    """Has a leaf that gave NaN or Inf computed once more.

    Raises StaleError for a leaf of another step or attempt, WireError for one that is not the node's.
    """
    current, span = scheduler.current(), Span(message.leaf, message.leaf + 1)
    version = current.request.adapter_version
    assignment = current.check(node.name, message.step, message.attempt, version, span)
    return scheduler.nonfinite(assignment, span, nodes, said=True)
