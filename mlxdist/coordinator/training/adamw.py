"""AdamW on the flat float32 vector, in blocks of 1 MiB (`protocol.vectors.BLOCK_ELEMENTS`)."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx.optimizers import AdamW as BlockAdamW

from mlxdist.coordinator.config.schema import TrainConfig
from mlxdist.coordinator.training.moments import Moments
from mlxdist.protocol.vectors import BLOCK_ELEMENTS, Vector

FIRST, SECOND = "first_moment", "second_moment"  # running means of the gradient and of its square


@dataclass(frozen=True, slots=True)
class AdamW:
    """Adam with decoupled weight decay and bias correction: https://arxiv.org/abs/1711.05101."""

    betas: Sequence[float]
    eps: float
    weight_decay: float

    @classmethod
    def of(cls, train: TrainConfig) -> "AdamW":
        """The optimizer of a run's [train] table."""
        return cls(train.betas, train.eps, train.weight_decay)

    def init(self, size: int) -> Moments:
        """Returns zero moments for `size` parameters."""
        return no_moments(size)

    def update(
        self, parameters: Vector, gradient: Vector, moments: Moments, learning_rate: float
    ) -> tuple[Vector, Moments]:
        """Returns the parameters [P] after one update, and the state after it.

        It is computed by mlx.optimizers on the CPU, whose default has no bias correction and first updates of 3 to 5
        learning rates. It goes block by block, so that it holds little beside what it returns. The bits of an element
        depend on that element alone. Raises ValueError when the lengths differ.
        """
        size, first, second = len(parameters), moments.vectors[FIRST], moments.vectors[SECOND]
        if not len(gradient) == len(first) == len(second) == size:
            raise ValueError(f"{size} parameters, {len(gradient)} gradients, {len(first)} and {len(second)} moments")
        after, new_first, new_second = (np.empty(size, dtype=np.float32) for _ in range(3))
        with mx.stream(mx.cpu):
            for start in range(0, size, BLOCK_ELEMENTS):
                block = slice(start, start + BLOCK_ELEMENTS)
                optimizer = BlockAdamW(
                    learning_rate, list(self.betas), self.eps, self.weight_decay, bias_correction=True
                )
                optimizer.state["step"] = mx.array(moments.step, mx.uint64)
                optimizer.state["block"] = {"m": mx.array(first[block]), "v": mx.array(second[block])}
                updated = optimizer.apply_gradients(
                    {"block": mx.array(gradient[block])}, {"block": mx.array(parameters[block])}
                )
                mx.eval(updated, optimizer.state)
                after[block] = np.asarray(updated["block"])
                new_first[block] = np.asarray(optimizer.state["block"]["m"])
                new_second[block] = np.asarray(optimizer.state["block"]["v"])
        return after, Moments(moments.step + 1, {FIRST: new_first, SECOND: new_second})


def no_moments(size: int) -> Moments:
    """The state of AdamW before the first update of `size` parameters."""
    return Moments(0, {name: np.zeros(size, dtype=np.float32) for name in (FIRST, SECOND)})
