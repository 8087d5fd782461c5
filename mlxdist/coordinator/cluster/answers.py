"""Answers of workers about their leaves: row outputs, or NaN and Inf."""

import numpy as np

from mlxdist.coordinator.cluster.events import Event, NotNeeded, news_of
from mlxdist.coordinator.cluster.node import Node
from mlxdist.coordinator.cluster.scheduler import Scheduler
from mlxdist.coordinator.schedule.rounds import RowOutputs, leaf_tokens
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import WireError
from mlxdist.protocol.leaves import Leaf
from mlxdist.protocol.tree import Span


def leaf_answered(node: Node, message: m.LeafAnswer, payload: memoryview, scheduler: Scheduler) -> list[Event]:
    """Keeps the row outputs of a leaf, and measures its node.

    Raises StaleError for an answer to something else, WireError for row outputs of another shape.
    """
    current, span = scheduler.current(), Span(message.leaf, message.leaf + 1)
    assignment = current.check(node.name, message.step, message.attempt, message.adapter_version, span)
    leaf = current.request.leaves[message.leaf]
    outputs = row_outputs(leaf, message, payload)
    verb = current.request.verb
    if verb == "score" and not np.isfinite(outputs).all() and message.leaf not in current.nonfinite:
        # The same again is a result, and for the caller to judge: a validation loss may be infinite, KTO's z0 may not.
        news = news_of(node, scheduler.nonfinite(assignment, message.leaf), "computed once more")
        return [news, NotNeeded(assignment)]
    done = current.answer(assignment, message.leaf, outputs)
    node.worker.leaves_done += 1
    node.peak_bytes = max(node.peak_bytes, message.peak_bytes)
    tokens = leaf_tokens(leaf)
    scheduler.deadlines.took(sum(tokens), max(tokens), message.seconds)
    node.speed.leaf(verb, (sum(tokens), max(tokens)), message.seconds)
    return [*map(NotNeeded, done)]


def row_outputs(leaf: Leaf, message: m.LeafAnswer, payload: memoryview) -> RowOutputs:
    """The float32 row outputs [rows or pairs, columns] of an answer. Raises WireError for another size."""
    rows = len(leaf.rows) // len(leaf.widths)
    if message.columns < 1 or payload.nbytes != 4 * rows * message.columns:
        what = f"{payload.nbytes} bytes in {message.columns} columns for {rows} rows"
        raise WireError(f"the answer to leaf {message.leaf} has {what}")
    return np.frombuffer(payload, np.float32).reshape(rows, message.columns)


def nonfinite_leaf(node: Node, message: m.Fault, scheduler: Scheduler) -> list[Event]:
    """Has a leaf that gave NaN or Inf computed once more. Raises StaleError for a leaf that is not the node's."""
    current, span = scheduler.current(), Span(message.leaf, message.leaf + 1)
    version = current.request.adapter_version
    assignment = current.check(node.name, message.step, message.attempt, version, span)
    return [news_of(node, scheduler.nonfinite(assignment, message.leaf), "computed once more")]
