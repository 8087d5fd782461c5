"""The memory that the layers and the head of a model take on this machine, measured with the code that trains.

The model is loaded lazily. A few layers of each kind do their work; all others hand their input on and are never read
from the disk. So a large model takes a second or two, and a small part of the memory that a run needs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxdist.node.backward.backward import GradientPath, backward
from mlxdist.node.backward.chunked_layers import has_gated_delta
from mlxdist.node.backward.events import RowSums
from mlxdist.node.backward.layer_hooks import Call, hooked
from mlxdist.node.backward.layout import pack
from mlxdist.node.backward.parameters import trainable
from mlxdist.node.backward.pytree import UnsupportedError, arrays_in
from mlxdist.node.backward.supervised import Supervised
from mlxdist.protocol.leaves import Row
from mlxdist.protocol.lora_targets import layers_of
from mlxdist.protocol.memory_probe import (
    CHUNK,
    GRAPH_CHUNKS,
    HEAD_CHUNKS,
    MOST_KINDS,
    SEVERAL,
    SHORT,
    KindBytes,
    Pair,
    ProbeAnswer,
    companion,
    segment_lengths,
)

Kind = tuple[object, ...]
LORA = ("lora_a", "lora_b")


@dataclass(frozen=True, slots=True)
class _Probe:
    """A model of which a few layers work at a time."""

    model: nn.Module
    layers: tuple[nn.Module, ...]
    vocabulary: int
    chunked: bool

    def graph(self, places: Sequence[int], tokens: int, chunk: int = CHUNK) -> int:
        """The peak of the whole graph with the layers at `places` at work."""
        return self._peak(places, tokens, GradientPath(chunked=self.chunked), chunk)

    def segment(self, places: Sequence[int], tokens: int) -> int:
        """The peak of segments of one layer, without the hidden states that are kept at their borders."""
        peak = self._peak(places, tokens, GradientPath(segment_size=1, chunked=self.chunked), CHUNK)
        borders = len(places) - 1 + (min(places) > 0)
        return max(peak - borders * self._hidden_bytes(tokens), 0)

    def head(self, chunk: int) -> int:
        """The peak of the head in segments: no layer works, and the backward ends before the top one's."""
        return self._peak((), SHORT, GradientPath(segment_size=1), chunk)

    def _hidden_bytes(self, tokens: int) -> int:
        sizes: list[int] = []

        def note(layer: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> mx.array:
            hidden = _hidden(args, kwargs)
            sizes.append(hidden.nbytes)
            return hidden

        with hooked(self.layers, note):
            self.model(_row(tokens, self.vocabulary).inputs)
        return sizes[0]

    def _peak(self, places: Sequence[int], tokens: int, path: GradientPath, chunk: int) -> int:
        """Returns the peak bytes above the model of one row's gradient; without places, of its head alone."""
        at_work = [self.layers[place] for place in places]
        for layer in self.layers:
            layer.freeze()
        for layer in at_work or self.layers[-1:]:
            layer.unfreeze(keys=list(LORA), strict=False)
        batch = _row(tokens, self.vocabulary)
        own = {id(layer) for layer in at_work}

        def run(layer: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return call(*args, **kwargs) if id(layer) in own else _hidden(args, kwargs)

        mx.eval([layer.parameters() for layer in at_work])
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        parts: list[object] = []  # held, as by a node that has not sent them yet
        with hooked(self.layers, run):
            for event in backward(self.model, [batch], _loss, head_chunk=chunk, path=path):
                if isinstance(event, RowSums) and not at_work:
                    break
                parts.append(event)
        return max(int(mx.get_peak_memory()) - before, 0)


def measure(model: nn.Module, vocabulary: int, *, chunked: bool, long: int) -> ProbeAnswer:
    """Returns what the layers of a lazily loaded model with LoRA take, in rows of SHORT and of `long` tokens.

    Afterwards other parameters of the model train than before. Raises UnsupportedError for a model whose layers cannot
    hand their input on, or with too many kinds of them; the model's own code raises what it likes.
    """
    layers = tuple(layers_of(model))
    order, kinds = _kinds(layers)
    if len(kinds) > MOST_KINDS:
        raise UnsupportedError(f"its layers are of {len(kinds)} kinds, and at most {MOST_KINDS} are measured")
    probe = _Probe(model, layers, vocabulary, chunked and has_gated_delta(model))
    probe.head(CHUNK)  # reads the embedding and the head from the disk
    lengths = (SHORT, long)
    found = []
    for number, places in enumerate(kinds):
        one, several, two = places[-1:], places[-SEVERAL:], places[-2:]
        if len(places) == 1 and (other := companion(order, number)) is not None:
            several = sorted([*one, kinds[other][-1]])
        found.append(
            KindBytes(
                layers=min(len(places), SEVERAL),
                one=_pair(partial(probe.graph, one), lengths),
                several=_pair(partial(probe.graph, several), lengths),
                # Two: the lower one needs no gradient of its input.
                segment=tuple(probe.segment(two, tokens) for tokens in segment_lengths(long)),
            )
        )
    return ProbeAnswer(
        long=long,
        kinds=tuple(found),
        order=order,
        head=_pair(probe.head, HEAD_CHUNKS),
        graph=_pair(partial(probe.graph, kinds[0][-1:], SHORT), GRAPH_CHUNKS),
    )


def _pair(measured: Callable[[int], int], values: tuple[int, int]) -> Pair:
    return measured(values[0]), measured(values[1])


def _kinds(layers: Sequence[nn.Module]) -> tuple[tuple[int, ...], list[list[int]]]:
    """Returns the number of each layer's kind, -1 below the lowest that trains, and the places of each kind."""
    lowest = next(place for place, layer in enumerate(layers) if trainable(layer))
    places: dict[Kind, list[int]] = {}
    for place in range(lowest, len(layers)):
        places.setdefault(_kind(layers[place]), []).append(place)
    kinds = list(places.values())
    of_place = {place: number for number, those in enumerate(kinds) for place in those}
    return tuple(of_place.get(place, -1) for place in range(len(layers))), kinds


def _kind(layer: nn.Module) -> Kind:
    """Returns what layers of one kind share: their modules, with sizes and settings that are no numbers.

    Numbers are left out, as many are those of the layer; so are bits and ranks, on which activations hardly depend.
    """
    return tuple(part for path, module in sorted(layer.named_modules()) for part in (path, *_facts(module)))


def _facts(module: nn.Module) -> Iterator[object]:
    yield type(module).__name__
    yield from sorted((key, value) for key, value in vars(module).items() if isinstance(value, bool | str))
    packs = hasattr(module, "bits")
    for name, value in sorted(module.items()):
        if isinstance(value, mx.array) and name not in LORA and not (packs and name in ("scales", "biases")):
            *front, last = value.shape
            yield name, *front, last * 32 // module.bits if packs and name == "weight" else last


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> mx.array:
    hidden = next(arrays_in((args, kwargs)), None)
    if hidden is None:
        raise UnsupportedError("a layer is given no array")
    return hidden


def _row(tokens: int, vocabulary: int) -> Supervised:
    ids = (np.arange(tokens + 1) * 7 % min(vocabulary, 1000)).astype(np.int32)
    batch = pack([(Row(0, ids, np.ones(tokens + 1, np.uint8)),)])
    mx.eval(batch.inputs, batch.positions, batch.ids, batch.targets, batch.rows)
    return batch


def _loss(sums: list[mx.array]) -> mx.array:
    return -sums[0].sum()
