"""The law of a model's memory as one machine has it, fitted to a few peaks that were measured there.

Its form is that of the table (prediction.py). Its coefficients belong to a kind of layer and a machine, so that kernels
which compute attention in blocks, recurrent states and experts need no terms of their own.

Shapes: T tokens of a packed leaf, L of its longest row, P picked positions, c positions of the head at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mlxdist.protocol.memory_probe import GRAPH_CHUNKS, HEAD_CHUNKS, SHORT, ProbeAnswer, companion, segment_lengths


@dataclass(frozen=True, slots=True)
class Law:
    """Bytes that grow with a leaf: fixed + token * T + pair * T * L. No coefficient is negative."""

    fixed: float = 0.0
    token: float = 0.0
    pair: float = 0.0

    def at(self, tokens: int, length: int) -> float:
        """Returns the bytes for a leaf of T `tokens` whose longest row has L."""
        return self.fixed + tokens * (self.token + self.pair * length)


@dataclass(frozen=True, slots=True)
class LayerLaw:
    """Layers of one kind."""

    kept: Law  # of one layer, until its backward
    once: Law  # beside it, while one layer is computed in the whole graph
    segment: tuple[Law, Law]  # of a segment of this layer alone, at its widest moment for short and for long rows

    def alone(self, tokens: int, length: int) -> float:
        """Returns the peak of a segment of this layer alone."""
        return max(law.at(tokens, length) for law in self.segment)


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A model on one machine."""

    kinds: tuple[LayerLaw, ...]
    order: tuple[int, ...]  # the kind of each layer; -1 below the lowest that trains
    head: float  # bytes for each position of a chunk, in segments
    head_states: float  # bytes for each picked position
    graph_head: float  # bytes for each position of a chunk, in the whole graph
    graph_overlap: float  # the same of the next chunk, where there is one

    def whole(self, tokens: int, length: int, picked: int, chunk: int) -> float:
        """Returns the peak of the whole graph: all layers are kept, and one of them or the head is at its widest."""
        kept = [kind.kept.at(tokens, length) for kind in self.kinds]
        once = max(kind.once.at(tokens, length) for kind in self.kinds)
        chunk = min(chunk, picked)
        head = self.graph_head * chunk + self.graph_overlap * min(chunk, picked - chunk)
        return sum(kept[kind] for kind in self.order if kind >= 0) + max(once, head)

    def segments(self, tokens: int, length: int, picked: int, chunk: int, size: int) -> float:
        """Returns the peak of segments of `size` layers, without the hidden states at their borders."""
        return max(self.head_bytes(picked, chunk), self.segment(tokens, length, size))

    def head_bytes(self, picked: int, chunk: int) -> float:
        """Returns the peak of the head in segments."""
        return self.head * min(chunk, picked) + self.head_states * picked

    def segment(self, tokens: int, length: int, size: int) -> float:
        """Returns the peak of the largest segment's backward: its layers are kept, and one is at its widest."""
        kept = [kind.kept.at(tokens, length) for kind in self.kinds]
        alone = [kind.alone(tokens, length) for kind in self.kinds]
        return max(
            sum(kept[kind] for kind in layers) + max(alone[kind] - kept[kind] for kind in set(layers))
            for layers in self._segments(size)
        )

    def borders(self, size: int) -> int:
        """Returns the number of hidden states that are kept between segments of `size` layers."""
        return len(list(self._segments(size))) - (self.order[0] >= 0)

    def _segments(self, size: int) -> Iterator[list[int]]:
        """Yields the kinds of the layers in each segment that has a backward; cut as the node cuts, from below."""
        for start in range(0, len(self.order), size):
            if layers := [kind for kind in self.order[start : start + size] if kind >= 0]:
                yield layers


def law_through(short: float, long: float, lengths: tuple[int, int]) -> Law:
    """Returns the law with these bytes for one row of each of two lengths; it never falls.

    What grows faster than the length has scores; what grows slower has a fixed part.
    """
    first, second = lengths
    short, long = max(short, 0.0), max(long, short, 0.0)
    if long * first >= short * second:
        pair = (long / second - short / first) / (second - first)
        return Law(token=max(short / first - pair * first, 0.0), pair=pair)
    token = (long - short) / (second - first)
    return Law(fixed=short - token * first, token=token)


def measured_model(answer: ProbeAnswer) -> MeasuredModel:
    """Returns the law that goes through what a machine has measured."""
    single, double = answer.graph
    kept = _kept(answer, 0)[0]
    overlap, alone = max(single - kept, 0.0) / GRAPH_CHUNKS[0], max(double - kept, 0.0) / GRAPH_CHUNKS[1]
    head = max(answer.head[1] - answer.head[0], 0) / (HEAD_CHUNKS[1] - HEAD_CHUNKS[0])
    return MeasuredModel(
        kinds=tuple(_layer_law(answer, number) for number in range(len(answer.kinds))),
        order=answer.order,
        head=head,
        head_states=max(answer.head[0] - head * HEAD_CHUNKS[0], 0.0) / SHORT,
        graph_head=alone,
        graph_overlap=max(overlap - alone, 0.0),
    )


def _kept(answer: ProbeAnswer, number: int) -> tuple[float, float]:
    """Returns the bytes that one layer of a kind keeps at both lengths: what it adds to others.

    Of the only layer of a model, everything counts as kept.
    """
    kind = answer.kinds[number]
    other = companion(answer.order, number)
    if kind.layers == 1 and other is None:
        return kind.one
    without = kind.one if kind.layers > 1 or other is None else answer.kinds[other].one
    more = max(kind.layers - 1, 1)
    short, long = (max(several - one, 0) / more for one, several in zip(without, kind.several, strict=True))
    return short, long


def _layer_law(answer: ProbeAnswer, number: int) -> LayerLaw:
    kind, long = answer.kinds[number], answer.long
    kept = _kept(answer, number)
    once = [one - held for one, held in zip(kind.one, kept, strict=True)]
    short, double, third, last = segment_lengths(long)
    segment = kind.segment
    return LayerLaw(
        kept=law_through(kept[0], kept[1], (SHORT, long)),
        once=law_through(once[0], once[1], (SHORT, long)),
        segment=(
            law_through(segment[0], segment[1], (short, double)),
            law_through(segment[2], segment[3], (third, last)),
        ),
    )
