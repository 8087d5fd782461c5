"""The order to measure the memory of a model's layers on a machine, and the answer, each one line of JSON.

The order goes to the standard input of a process in a worker's environment, over ssh for another host. The answer is
bytes that were measured; the coordinator fits its law to them. Every field has the most that it may hold.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from mlxdist.protocol.messages import RunSpec

SHORT = 256  # tokens of the shorter row: one block of a gated-delta layer is full
CHUNK = 32  # positions of the LM head, so few that the layers' memory shows
HEAD_CHUNKS = (64, SHORT)  # of SHORT positions, in segments
GRAPH_CHUNKS = (SHORT // 2, SHORT)  # of SHORT positions, in the whole graph: two chunks overlap, one does not
MOST_KINDS = 8  # of layers; a model with more is not measured
SEVERAL = 6  # layers of a kind at once, beside one
MOST_ANSWER = 1 << 16  # bytes of the line

Long = Annotated[int, Meta(ge=2 * SHORT, le=1 << 13)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 48)]
Pair = tuple[Bytes, Bytes]
Four = Annotated[tuple[Bytes, ...], Meta(min_length=4, max_length=4)]


class ProbeOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model, its LoRA layers, and the tokens of the longer row."""

    spec: RunSpec
    long: Long


class KindBytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Peaks above the model with layers of one kind at work: of a row of SHORT tokens, and of the longer row."""

    layers: Annotated[int, Meta(ge=1, le=SEVERAL)]  # of this kind, in `several`
    one: Pair  # whole graph, one layer
    several: Pair  # whole graph; the only layer of its kind is beside one of its `companion`
    segment: Four  # segments of one layer, of `segment_lengths`, without the hidden states at the borders


class ProbeAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that one machine has measured for a model."""

    long: Long
    kinds: Annotated[tuple[KindBytes, ...], Meta(min_length=1, max_length=MOST_KINDS)]
    order: Annotated[tuple[Annotated[int, Meta(ge=-1, lt=MOST_KINDS)], ...], Meta(min_length=1, max_length=4096)]
    """The kind of each layer; -1 below the lowest that trains, where nothing is kept."""
    head: Pair  # of SHORT positions in HEAD_CHUNKS, without the layers
    graph: Pair  # the first kind's `one`, of SHORT positions in GRAPH_CHUNKS


def segment_lengths(long: int) -> tuple[int, int, int, int]:
    """Returns the tokens of the rows of which segments are measured: two short ones, two long ones.

    From some length on the scores of a row are what a segment's backward holds at its widest moment.
    """
    return SHORT, 2 * SHORT, long, 2 * long


def companion(order: Sequence[int], kind: int) -> int | None:
    """Returns the kind, of those in `order`, that most layers have beside `kind`; None: there is no other."""
    others = sorted({each for each in order if each not in (-1, kind)})
    return max(others, key=list(order).count, default=None)


def read_answer(line: bytes) -> ProbeAnswer:
    """Returns the answer in a line. Raises ValueError for one that is no answer, or that contradicts itself."""
    if len(line) > MOST_ANSWER:
        raise ValueError("the answer is too long")
    answer = msgspec.json.decode(line, type=ProbeAnswer)
    if max(answer.order) >= len(answer.kinds) or max(answer.order) < 0:
        raise ValueError("the answer names a kind of layer that it has not measured")
    return answer
