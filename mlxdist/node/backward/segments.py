"""The segmented backward: memory for one segment of layers, one chunk of logits and what crosses between segments.

(i) the forward runs without a graph and keeps what crosses segment borders; (ii) the head, chunk by chunk, gives each
position's log-prob l and dl/dh; (iii) the loss gives its slope by row sum; (iv) segments from the top: the segment's
forward again under `mx.vjp`, its gradients evaluated, everything else freed; it ends with the lowest layer that trains.

Shapes: B rows, L positions, P picked positions, D hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import mlx.core as mx
import mlx.nn as nn

from mlxdist.node.backward.dropout import has_dropout
from mlxdist.node.backward.full_graph import Loss
from mlxdist.node.backward.head import chunks, head_pass, pick, scaled, traced
from mlxdist.node.backward.parameters import swapped, trainable
from mlxdist.node.backward.pytree import UnsupportedError
from mlxdist.node.backward.record import Edge, Record, record, run_segment
from mlxdist.node.backward.supervised import Picks, row_sums

Key = TypeVar("Key")
OnBegin = Callable[[list[mx.array]], None]  # row sums of each micro-batch; the backward begins
OnFinal = Callable[[list[str], dict[str, mx.array]], None]  # (names, their gradients), evaluated and final


@dataclass(slots=True)
class Pass:
    """One micro-batch on its way down: its record and the gradients that lower segments still have to receive."""

    picks: Picks
    seen: Record
    pulls: dict[Edge, mx.array]  # dF/d(border)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which parameters train in which segment, the same for every micro-batch."""

    parameters: dict[str, mx.array]
    names: dict[int, list[str]]  # segment -> its trainable parameters
    final: dict[int, list[str]]  # segment -> parameters that no lower segment adds to
    lowest: int  # the lowest call of a layer that trains
    size: int  # calls per segment
    calls: int

    def span(self, segment: int) -> tuple[int, int]:
        """The segment's calls (first, end)."""
        return segment * self.size, min((segment + 1) * self.size, self.calls)

    def downwards(self) -> range:
        """The segments that the backward visits, top first."""
        return range((self.calls - 1) // self.size, self.lowest // self.size - 1, -1)


def segmented_gradient(
    model: nn.Module,
    batches: Sequence[Picks],
    loss: Loss,
    *,
    segment_size: int,
    head_chunk: int,
    on_begin: OnBegin | None = None,
    on_final: OnFinal | None = None,
) -> tuple[list[mx.array], dict[str, mx.array]]:
    """Row sums of log-probs per batch and the gradient of `loss` by parameter name, evaluated.

    `on_begin` and `on_final` may raise to end it. Raises `UnsupportedError` for a model that cannot be cut at layers.
    """
    parameters = trainable(model)
    passes = [_forward(model, parameters, picks, segment_size) for picks in batches]
    plan = _plan(model, parameters, passes[0].seen, segment_size)
    sums = [_head(model, one, head_chunk) for one in passes]
    slopes = mx.grad(loss)(list(sums))
    for one, slope in zip(passes, slopes, strict=True):
        top = (plan.calls - 1, 0)
        one.pulls[top] = scaled(one.pulls[top], slope, one.picks)
        mx.eval(one.pulls)
    gradients: dict[str, mx.array] = {}
    if on_begin is not None:
        on_begin(sums)
    for segment in plan.downwards():
        for one in passes:
            _backward(model, plan, one, segment, gradients)
        if on_final is not None and plan.final[segment]:
            on_final(plan.final[segment], {name: gradients[name] for name in plan.final[segment]})
    return sums, {name: gradients[name] for name in parameters}


def _forward(model: nn.Module, parameters: dict[str, mx.array], picks: Picks, segment_size: int) -> Pass:
    """Step (i). The record is built first and computed afterwards, border by border: each frees what it passed."""

    def build(*values: mx.array) -> Record:
        with swapped(model, parameters, list(parameters), values):
            seen = record(model, picks.inputs, segment_size=segment_size, dropout=has_dropout(model))
        seen.hidden = pick(seen.hidden, picks.positions)
        return seen

    seen: Record = traced(build, *parameters.values())
    lowest = next((call for call, layer in enumerate(seen.layers) if trainable(layer)), len(seen.layers))
    kept = {edge for segment, edges in seen.crossing.items() if segment >= lowest // segment_size for edge in edges}
    seen.borders = {edge: seen.borders[edge] for edge in sorted(kept)}
    for border in seen.borders.values():
        mx.eval(border)
    mx.eval(seen.hidden)
    return Pass(picks, seen, {})


def _plan(model: nn.Module, parameters: dict[str, mx.array], seen: Record, size: int) -> Plan:
    paths = {id(module): path for path, module in model.named_modules()}
    of_call = [[f"{paths[id(layer)]}.{name}" for name in trainable(layer)] for layer in seen.layers]
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
    return Plan(parameters, names, final, lowest, size, len(of_call))


def _head(model: nn.Module, one: Pass, head_chunk: int) -> mx.array:
    """Step (ii): the row sums [B]; dl/dh is left in the pass as the top border's pull."""
    seen, picks = one.seen, one.picks
    top = (len(seen.layers) - 1, 0)
    logps: list[mx.array] = []
    pulls: list[mx.array] = []
    for span in chunks(picks.total, head_chunk):
        logp, pull = head_pass(model, seen.results, picks, seen.hidden[..., span[0] : span[1], :], span)
        mx.eval(logp)  # before the pull, which then may overwrite the logits
        mx.eval(pull)
        logps.append(logp)
        pulls.append(pull)
    one.pulls[top] = mx.concatenate(pulls, axis=-2) if pulls else mx.zeros_like(seen.hidden)
    sums = row_sums(mx.concatenate(logps) if logps else mx.zeros(0), picks.counts)
    mx.eval(sums, one.pulls)
    seen.hidden = mx.array(0.0)
    return sums


def _backward(model: nn.Module, plan: Plan, one: Pass, segment: int, gradients: dict[str, mx.array]) -> None:
    """Step (iv) for one segment of one micro-batch: adds to `gradients` and to the pulls of the borders below."""
    seen, span, names = one.seen, plan.span(segment), plan.names[segment]
    given = seen.crossing.get(segment, ())
    below = [] if span[0] <= plan.lowest else [e for e in given if mx.issubdtype(seen.borders[e].dtype, mx.floating)]
    received = sorted(edge for edge in one.pulls if edge[0] >= span[0])
    top = (plan.calls - 1, 0)

    def run(*values: mx.array) -> list[mx.array]:
        known = seen.borders | dict(zip(below, values[len(names) :], strict=True))
        with swapped(model, plan.parameters, names, values[: len(names)]):
            outputs = run_segment(
                model, one.picks.inputs, seen.results, known, span, random_state=seen.random_keys.get(segment)
            )
        return [pick(outputs[e], one.picks.positions) if e == top else outputs[e] for e in received]

    primals = [plan.parameters[name] for name in names] + [seen.borders[edge] for edge in below]
    # Only the gradients are kept: the outputs beside them would hold the whole graph.
    found = mx.vjp(run, primals, [one.pulls.pop(edge) for edge in received])[1]
    del primals
    # Module by module from the segment's end; at once, mlx would keep most of the activations until the last product.
    pairs = list(zip(names, found, strict=False))
    for _, module in groupby(reversed(pairs), key=lambda pair: pair[0].rpartition(".")[0]):
        mx.eval([value for _, value in module])
    del pairs
    _add(gradients, names, found[: len(names)])
    _add(one.pulls, below, found[len(names) :])
    del found
    mx.eval(gradients, one.pulls)
    lower = {edge for s, edges in seen.crossing.items() if s < segment for edge in edges}
    seen.borders = {edge: border for edge, border in seen.borders.items() if edge in lower}


def _add(store: dict[Key, mx.array], keys: Sequence[Key], values: Sequence[mx.array]) -> None:
    for key, value in zip(keys, values, strict=True):
        store[key] = store[key] + value if key in store else value
