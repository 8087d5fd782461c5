"""The events of a backward: the row sums once, then the gradients, top layer first; before the last, `Computing`."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

Loss = Callable[[list[mx.array]], mx.array]  # row sums [B] of each micro-batch -> the scalar sum of the losses


@dataclass(frozen=True, slots=True)
class Computing:
    """The device has all that is left of this backward, and Python nothing to do: a good time to build the next one."""


@dataclass(frozen=True, slots=True)
class RowSums:
    """The log-probs summed over each row's targets: float32 [B] per micro-batch, evaluated."""

    sums: list[mx.array]


@dataclass(frozen=True, slots=True)
class FinalPart:
    """Gradients by parameter name, evaluated, to which nothing is added any more."""

    gradients: dict[str, mx.array]


Events = Generator[Computing | RowSums | FinalPart, None, None]


def gathered(events: Events) -> tuple[list[mx.array], dict[str, mx.array]]:
    """Returns a backward as a whole: row sums [B] per micro-batch, and the gradient by parameter name."""
    sums: list[mx.array] = []
    gradients: dict[str, mx.array] = {}
    for event in events:
        match event:
            case RowSums():
                sums = event.sums
            case FinalPart():
                gradients |= event.gradients
            case Computing():
                pass
    return sums, gradients


@contextmanager
def computing(*arrays: Any) -> Iterator[None]:
    """Lets the device compute lists or dicts of arrays meanwhile; they are evaluated on leaving, however it is left.

    Only graphs may be built inside: anything that is evaluated takes memory beside these arrays.
    """
    mx.async_eval(*arrays)
    try:
        yield
    finally:
        mx.eval(*arrays)
