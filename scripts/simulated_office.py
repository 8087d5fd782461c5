"""The clusters that scripts/simulated_cluster.py simulates: their Macs, cables, vectors and leaves."""

import math
from dataclasses import dataclass, field

import numpy as np

from mlxdist.coordinator.cluster.placement import Assigner
from mlxdist.coordinator.config.schema import TimingConfig
from mlxdist.coordinator.schedule.assign import assign
from mlxdist.protocol.leaves import Leaf, Row
from mlxdist.protocol.vectors import BLOCK_BYTES
from mlxdist.protocol.wire import Frames


@dataclass(frozen=True)
class Mac:
    """One node: its speed, its cable, and when it comes and goes.

    `spread`: of the time of a leaf around its mean, as a share (log-normal). `slow`: (from, to, factor), a time in
    which a leaf takes `factor` times as long. Times are seconds after the first step's begin.
    """

    name: str
    tokens_per_second: float
    bytes_per_second: float = math.inf
    joins: float | None = None  # None: it is there from the start
    lost: float | None = None
    spread: float = 0.0
    slow: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class Office:
    """The cluster to simulate: its Macs, the coordinator's cable, the vector's bytes, and how it is assigned.

    `frames`: bytes on a cable for each byte of a message. `delay`: seconds of a message on its way. `elements`: of the
    vectors that are really sent; each byte of theirs stands for so many as make `vector_bytes`. Where that leaves one
    block, no block shows on the way that a node is there: `timing` must have the patience for a whole vector.
    """

    macs: tuple[Mac, ...]
    vector_bytes: int
    bytes_per_second: float = math.inf
    frames: float = 1.0
    delay: float = 0.0
    elements: int = 1
    one_by_one: bool = False  # the coordinator gets every message alone, as when it is never behind
    timing: TimingConfig = field(default_factory=TimingConfig)
    assigner: Assigner = assign
    uneven: float = 0.0  # of the shares of the coordinator's cable, see simulated_links.py
    seed: int = 0


def stands_for(frames: Frames, office: Office) -> int:
    """Returns the bytes that the frames of a vector's block stand for, with the heads of all blocks that it replaces.

    An office whose vectors are really sent has the bytes of the frames.
    """
    *heads, payload = (memoryview(frame).nbytes for frame in frames)
    true_payload = round(payload * office.vector_bytes / (4 * office.elements))
    return true_payload + sum(heads) * -(-true_payload // BLOCK_BYTES)


def equal_leaves(number: int, tokens: int) -> list[Leaf]:
    """Returns leaves of one row of `tokens` tokens each."""
    row = Row(0, np.ones(tokens, np.int32), np.array([0] + [1] * (tokens - 1), np.uint8))
    return [Leaf(index, (row,)) for index in range(number)]
