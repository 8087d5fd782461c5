"""A model's forward recorded at its layer calls, and run again with some of the calls answered from the record.

A layer call is known by its number in the order of the calls, an array that a call returned by (call, place in its
result). An array that crosses from one segment of calls into a later one is a *border*: always the first array of a
segment's last call, and any other that a later layer is given (keys and values that gemma3n and gemma4 share).

Shapes: B rows, L positions, D hidden size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxdist.node.backward.dropout import random_key
from mlxdist.node.backward.layer_hooks import Call, hooked
from mlxdist.node.backward.pytree import UnsupportedError, arrays_in, fresh, put_together, take_apart

Edge = tuple[int, int]  # (call, place in the call's result)


@dataclass(slots=True)
class ForwardRecord:
    """One forward at its layer calls. With segments, `borders` holds arrays and empties as the backward goes down."""

    hidden: mx.array  # [..., B, L, D], the first array of the last call
    results: tuple[Any, ...]  # the structure of each call's result
    layers: tuple[nn.Module, ...]  # the layer of each call
    borders: dict[Edge, mx.array] = field(default_factory=dict)
    crossing: dict[int, tuple[Edge, ...]] = field(default_factory=dict)  # segment -> the borders that it is given
    random_keys: dict[int, int] = field(default_factory=dict)  # segment -> the random state at its start


def record_forward(
    model: nn.Module, inputs: mx.array, *, segment_size: int = 0, dropout: bool = False
) -> ForwardRecord:
    """Runs `model` on `inputs` [B, L]. Nothing is evaluated here: what is not kept, the head too, is never computed.

    Args:
        model: any mlx-lm model.
        inputs: int32 token ids.
        segment_size: layer calls per segment; 0 records no borders.
        dropout: also note the random state at the start of each segment.
    """
    results: list[Any] = []
    layers: list[nn.Module] = []
    last: list[mx.array] = []
    made: dict[int, tuple[mx.array, Edge]] = {}  # by identity; the array is held so that its identity stays its own
    borders: dict[Edge, mx.array] = {}
    crossing: dict[int, dict[Edge, None]] = {}
    keys: dict[int, int] = {}

    def note_borders(call: int, given: Any) -> None:
        segment = call // segment_size
        edges = crossing.setdefault(segment, {})
        if call % segment_size == 0:
            if dropout:
                keys[segment] = random_key()
            if call:
                edges[call - 1, 0] = None
                borders[call - 1, 0] = last[0]
        for array in arrays_in(given):
            found = made.get(id(array))
            if found is not None and found[1][0] // segment_size < segment:
                edges[found[1]] = None
                borders.setdefault(found[1], fresh(array))

    def watch(layer: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if segment_size:
            note_borders(len(layers), (args, kwargs))
        result = call(*args, **kwargs)
        arrays: list[mx.array] = []
        results.append(take_apart(result, arrays))
        if not arrays:
            raise UnsupportedError("a layer returns no array")
        made.update({id(array): (array, (len(layers), place)) for place, array in enumerate(arrays)})
        last[:] = [fresh(arrays[0])]
        layers.append(layer)
        return result

    with hooked(model.layers, watch):
        model(inputs)
    if not layers:
        raise UnsupportedError("the model never calls its layers")
    given_to = {segment: tuple(edges) for segment, edges in crossing.items()}
    return ForwardRecord(last[0], tuple(results), tuple(layers), borders, given_to, keys)


def answer_calls(
    model: nn.Module, inputs: mx.array, results: Sequence[Any], known: Mapping[Edge, mx.array]
) -> mx.array:
    """Returns the logits of `inputs` with every layer call answered from `known`: only the model's own head runs."""
    calls = 0

    def stub(layer: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal calls
        calls += 1
        return _answer(calls - 1, results, known, (args, kwargs))

    with hooked(model.layers, stub):
        logits: mx.array = model(inputs)
    if calls != len(results):
        raise UnsupportedError("the model calls its layers less often on a second run")
    return logits


class _SegmentDone(Exception):  # noqa: N818 - a way out, no error
    """Leaves the model after a segment's last call."""


def run_segment(
    model: nn.Module,
    inputs: mx.array,
    results: Sequence[Any],
    known: Mapping[Edge, mx.array],
    calls: tuple[int, int],
    *,
    random_state: int | None = None,
) -> dict[Edge, mx.array]:
    """Returns the arrays that `calls` = (first, end) return when the calls below are answered from `known`.

    The model's own code runs between the calls, so masks, scalings and per-layer inputs need not be recorded.
    """
    first, end = calls
    count = 0
    outputs: dict[Edge, mx.array] = {}

    def run(layer: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal count
        this, count = count, count + 1
        if this < first:
            return _answer(this, results, known, (args, kwargs))
        if this == first and random_state is not None:
            mx.random.seed(random_state)
        result = call(*args, **kwargs)
        outputs.update({(this, place): fresh(array) for place, array in enumerate(arrays_in(result))})
        if this == end - 1:
            raise _SegmentDone
        return result

    try:
        with hooked(model.layers, run):
            model(inputs)
    except _SegmentDone:
        return outputs
    raise UnsupportedError("the model calls its layers less often on a second run")


def _answer(call: int, results: Sequence[Any], known: Mapping[Edge, mx.array], given: Any) -> Any:
    """Returns a stub's result: what is known of it, its own input for an unknown h, None for other arrays."""
    if call >= len(results):
        raise UnsupportedError("the model calls its layers more often on a second run")
    return put_together(results[call], _Known(call, known, given))


@dataclass(frozen=True, slots=True)
class _Known:
    """The arrays of one call's result, by their place, as `put_together` reads them."""

    call: int
    known: Mapping[Edge, mx.array]
    given: Any

    def __getitem__(self, place: int) -> mx.array | None:
        if (self.call, place) in self.known:
            return fresh(self.known[self.call, place])
        # An h that was not kept is read by stubs only. The code between the layers needs some array: the input.
        return next(arrays_in(self.given), None) if place == 0 else None
