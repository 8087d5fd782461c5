"""The segmented backward: memory for one segment of layers, one chunk of logits and the arrays between segments.

(i) The forward runs without a graph and keeps what crosses segment borders. (ii) The head, chunk by chunk, gives each
position's log-prob l and dl/dh. (iii) The loss gives the cotangent of each row sum. (iv) Segments from the top: the
segment's forward again under `mx.vjp`, its gradients evaluated, everything else freed; it ends with the lowest layer
that trains.

Shapes: B rows, L positions, P supervised positions, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import mlx.core as mx
import mlx.nn as nn

from mlxdist.node.backward.dropout import has_dropout
from mlxdist.node.backward.events import Computing, Events, FinalPart, Loss, RowSums, computing
from mlxdist.node.backward.head import at_positions, chunks, head_backward, hidden_cotangent, traced
from mlxdist.node.backward.packing import packed
from mlxdist.node.backward.parameters import swapped, trainable
from mlxdist.node.backward.pytree import UnsupportedError
from mlxdist.node.backward.record import Edge, ForwardRecord, record_forward, run_segment
from mlxdist.node.backward.supervised import Supervised, row_sums

Key = TypeVar("Key")


@dataclass(slots=True)
class BatchState:
    """One micro-batch during the backward: its forward, and the cotangents that lower segments will receive."""

    batch: Supervised
    forward: ForwardRecord
    cotangents: dict[Edge, mx.array]  # dF/d(border)


@dataclass(frozen=True, slots=True)
class Segmentation:
    """The parameters that train in each segment, the same for every micro-batch."""

    parameters: dict[str, mx.array]
    names: dict[int, list[str]]  # segment -> its trainable parameters
    final: dict[int, list[str]]  # segment -> parameters that no lower segment adds to
    lowest: int  # the lowest call of a layer that trains
    size: int  # calls per segment
    calls: int

    def calls_of(self, segment: int) -> tuple[int, int]:
        """The segment's layer calls (first, end)."""
        return segment * self.size, min((segment + 1) * self.size, self.calls)

    def downwards(self) -> range:
        """The segments that the backward visits, top first."""
        return range((self.calls - 1) // self.size, self.lowest // self.size - 1, -1)


@dataclass(frozen=True, slots=True)
class SegmentGraph:
    """The backward of one segment of one micro-batch."""

    segment: int
    state: BatchState
    names: list[str]
    below: list[Edge]  # the borders that get a cotangent
    found: list[mx.array]  # the gradients of `names`, then the cotangents of `below`; nothing of it is computed


def segmented_backward(
    model: nn.Module, batches: Sequence[Supervised], loss: Loss, *, segment_size: int, head_chunk: int
) -> Events:
    """Builds the forward of each batch. The events: row sums of log-probs, then the gradients that each segment makes
    final, with `Computing` in the last one.

    A part that was yielded is not kept here. Raises `UnsupportedError` for a model that cannot be cut at its layers.
    """
    parameters = trainable(model)
    states = [BatchState(batch, _forward(model, parameters, batch, segment_size), {}) for batch in batches]
    plan = _segmentation(model, parameters, states[0].forward, segment_size)
    return _computed(model, plan, states, loss, head_chunk)


def _computed(
    model: nn.Module, plan: Segmentation, states: Sequence[BatchState], loss: Loss, head_chunk: int
) -> Events:
    """Yields the events. Each segment's graph is built while the device computes the one before it."""
    for state in states:
        _evaluate_forward(state.forward)
    sums = [_head(model, state, head_chunk) for state in states]
    top = (plan.calls - 1, 0)
    for state, row_cotangents in zip(states, mx.grad(loss)(list(sums)), strict=True):
        state.cotangents[top] = hidden_cotangent(state.cotangents[top], row_cotangents, state.batch)
    graphs = (_built(model, plan, segment, state) for segment in plan.downwards() for state in states)
    with computing([state.cotangents[top] for state in states]):
        upcoming = next(graphs, None)
    yield RowSums(sums)
    gradients: dict[str, mx.array] = {}
    while upcoming is not None:
        segment, last = upcoming.segment, upcoming.state is states[-1]
        rest = _evaluated_to_the_last_module(upcoming, gradients)
        with computing(rest):
            upcoming = next(graphs, None)
            if upcoming is None:
                yield Computing()
        del rest
        if last and plan.final[segment]:
            yield FinalPart({name: gradients.pop(name) for name in plan.final[segment]})


def _forward(model: nn.Module, parameters: dict[str, mx.array], batch: Supervised, segment_size: int) -> ForwardRecord:
    """Builds step (i)."""

    def build(*values: mx.array) -> ForwardRecord:
        with swapped(model, parameters, list(parameters), values), packed(model, batch.packing):
            forward = record_forward(model, batch.inputs, segment_size=segment_size, dropout=has_dropout(model))
        forward.hidden = at_positions(forward.hidden, batch.positions)
        return forward

    forward: ForwardRecord = traced(build, *parameters.values())
    lowest = next((call for call, layer in enumerate(forward.layers) if trainable(layer)), len(forward.layers))
    kept = {edge for segment, edges in forward.crossing.items() if segment >= lowest // segment_size for edge in edges}
    forward.borders = {edge: forward.borders[edge] for edge in sorted(kept)}
    return forward


def _evaluate_forward(forward: ForwardRecord) -> None:
    """Step (i), border by border: each frees what it passed."""
    for border in forward.borders.values():
        mx.eval(border)
    mx.eval(forward.hidden)


def _segmentation(model: nn.Module, parameters: dict[str, mx.array], forward: ForwardRecord, size: int) -> Segmentation:
    paths = {id(module): path for path, module in model.named_modules()}
    of_call = [[f"{paths[id(layer)]}.{name}" for name in trainable(layer)] for layer in forward.layers]
    if outside := parameters.keys() - {name for names in of_call for name in names}:
        raise UnsupportedError(f"{min(outside)} trains outside of the layers")
    segments = range((len(of_call) - 1) // size + 1)
    names = {s: list(dict.fromkeys(n for ns in of_call[s * size : (s + 1) * size] for n in ns)) for s in segments}
    settled: set[str] = set()
    final: dict[int, list[str]] = {}
    for segment in segments:  # bottom up: a layer that is called twice is final at its lower call
        final[segment] = [name for name in names[segment] if name not in settled]
        settled.update(names[segment])
    lowest = next(call for call, own in enumerate(of_call) if own)
    return Segmentation(parameters, names, final, lowest, size, len(of_call))


def _head(model: nn.Module, state: BatchState, head_chunk: int) -> mx.array:
    """Step (ii): returns the row sums [B]; dl/dh is left in the state as the top border's cotangent."""
    forward, batch = state.forward, state.batch
    top = (len(forward.layers) - 1, 0)
    logps: list[mx.array] = []
    cotangents: list[mx.array] = []
    for chunk in chunks(batch.total, head_chunk):
        logp, dl_dh = head_backward(model, forward.results, batch, forward.hidden[..., chunk[0] : chunk[1], :], chunk)
        mx.eval(logp)  # before dl/dh, which then may overwrite the logits
        mx.eval(dl_dh)
        logps.append(logp)
        cotangents.append(dl_dh)
    state.cotangents[top] = mx.concatenate(cotangents, axis=-2) if cotangents else mx.zeros_like(forward.hidden)
    sums = row_sums(mx.concatenate(logps) if logps else mx.zeros(0), batch.counts)
    mx.eval(sums, state.cotangents)
    forward.hidden = mx.array(0.0)
    return sums


def _built(model: nn.Module, plan: Segmentation, segment: int, state: BatchState) -> SegmentGraph:
    """Builds step (iv) for one segment of one micro-batch; takes its cotangents and its borders out of the state."""
    forward, calls, names = state.forward, plan.calls_of(segment), plan.names[segment]
    given = forward.crossing.get(segment, ())
    below = (
        [] if calls[0] <= plan.lowest else [e for e in given if mx.issubdtype(forward.borders[e].dtype, mx.floating)]
    )
    received = sorted(edge for edge in state.cotangents if edge[0] >= calls[0])
    top = (plan.calls - 1, 0)

    def run(*values: mx.array) -> list[mx.array]:
        known = forward.borders | dict(zip(below, values[len(names) :], strict=True))
        with swapped(model, plan.parameters, names, values[: len(names)]), packed(model, state.batch.packing):
            outputs = run_segment(
                model, state.batch.inputs, forward.results, known, calls, random_state=forward.random_keys.get(segment)
            )
        return [at_positions(outputs[e], state.batch.positions) if e == top else outputs[e] for e in received]

    primals = [plan.parameters[name] for name in names] + [forward.borders[edge] for edge in below]
    # Only the gradients are kept: the outputs beside them would hold the whole graph.
    found = mx.vjp(run, primals, [state.cotangents.pop(edge) for edge in received])[1]
    lower = {edge for s, edges in forward.crossing.items() if s < segment for edge in edges}
    forward.borders = {edge: border for edge, border in forward.borders.items() if edge in lower}
    return SegmentGraph(segment, state, names, below, found)


def _evaluated_to_the_last_module(graph: SegmentGraph, gradients: dict[str, mx.array]) -> list[mx.array]:
    """Evaluates a segment module by module from its end; at once, mlx would keep most activations until the last one.

    Adds to `gradients` and to the cotangents of the borders below. Returns what is left to evaluate.
    """
    pairs = list(zip(graph.names, graph.found, strict=False))
    modules = [list(group) for _, group in groupby(reversed(pairs), key=lambda pair: pair[0].rpartition(".")[0])]
    for module in modules[:-1]:
        mx.eval([value for _, value in module])
    _add(gradients, graph.names, graph.found[: len(pairs)])
    _add(graph.state.cotangents, graph.below, graph.found[len(pairs) :])
    return [*(gradients[name] for name in graph.names), *graph.state.cotangents.values()]


def _add(store: dict[Key, mx.array], keys: Sequence[Key], values: Sequence[mx.array]) -> None:
    for key, value in zip(keys, values, strict=True):
        store[key] = store[key] + value if key in store else value
