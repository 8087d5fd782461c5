"""The events of a backward, in the order in which they come: the row sums once, then the gradients, top layer first."""

from collections.abc import Callable, Generator
from dataclasses import dataclass

import mlx.core as mx

Loss = Callable[[list[mx.array]], mx.array]  # row sums [B] of each micro-batch -> the scalar sum of the losses


@dataclass(frozen=True, slots=True)
class RowSums:
    """The log-probs summed over each row's targets: float32 [B] per micro-batch, evaluated."""

    sums: list[mx.array]


@dataclass(frozen=True, slots=True)
class FinalPart:
    """Gradients by parameter name, evaluated, to which nothing is added any more."""

    gradients: dict[str, mx.array]


Events = Generator[RowSums | FinalPart, None, None]


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
    return sums, gradients
