"""An optimizer seen from outside: where it begins, one update, and the state in between."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from mlxdist.protocol.vectors import Vector


@dataclass(frozen=True, slots=True)
class Moments:
    """The state of an optimizer: what a resumed run needs beside the parameters.

    `vectors` [P] are saved under their names, so those must be the optimizer's own and stay the same.
    """

    step: int  # updates done
    vectors: Mapping[str, Vector]


class Optimizer(Protocol):
    """One rule of updating P parameters. Its functions are pure and change none of their arguments."""

    def init(self, size: int) -> Moments:
        """Returns the state before the first update of `size` parameters."""

    def update(
        self, parameters: Vector, gradient: Vector, moments: Moments, learning_rate: float
    ) -> tuple[Vector, Moments]:
        """Returns the parameters [P] after one update by a gradient [P], and the state after it."""
