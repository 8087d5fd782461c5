"""One optimizer step on the flat float32 vector: divide once, clip once, AdamW. Nothing here knows of nodes.

Shapes: P trainable parameters in manifest order, in blocks of 1 MiB (`protocol.vectors.BLOCK_ELEMENTS`). Every function
is pure: the vectors of the step before may still be on their way to a node or to the disk.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.optimizers import AdamW

from mlxdist.protocol.errors import NonFiniteError
from mlxdist.protocol.tree import fold
from mlxdist.protocol.vectors import BLOCK_ELEMENTS, Vector

CLIP_EPS = 1e-6  # as torch's clip_grad_norm_ and mlx's clip_grad_norm: keeps the scale finite


@dataclass(frozen=True, slots=True)
class Moments:
    """AdamW's state: what a resumed run needs beside the parameters."""

    step: int  # updates done
    first: Vector  # m [P], running mean of the gradient
    second: Vector  # v [P], running mean of its square


def no_moments(size: int) -> Moments:
    """The state before the first step."""
    return Moments(0, np.zeros(size, dtype=np.float32), np.zeros(size, dtype=np.float32))


def block_square_sum(block: Vector) -> float:
    """The sum of squares of at most BLOCK_ELEMENTS numbers, the same bits on every machine.

    Squares of float32 are exact in float64. They are added by halving: numpy's own sum depends on its build.
    """
    squares: npt.NDArray[np.float64] = np.zeros(1 << max(len(block) - 1, 0).bit_length(), dtype=np.float64)
    np.square(block, dtype=np.float64, out=squares[: len(block)])
    while len(squares) > 1:
        middle = len(squares) // 2
        squares = squares[:middle] + squares[middle:]
    return float(squares[0])


def norm(vector: Vector) -> float:
    """The 2-norm of a vector of one number or more: the canonical tree over its blocks' sums of squares."""
    starts = range(0, len(vector), BLOCK_ELEMENTS)
    return math.sqrt(fold([block_square_sum(vector[start : start + BLOCK_ELEMENTS]) for start in starts], add))


def clip(gradient_sum: Vector, total_weight: float, max_grad_norm: float) -> tuple[Vector, float]:
    """The gradient [P] of the whole step, clipped, and its norm before clipping.

    `gradient_sum` [P] is the finished sum and `total_weight` its tokens, pairs or rows: the one division of a step.
    `max_grad_norm` = 0 does not clip. Raises NonFiniteError for a sum with NaN or infinity.
    """
    if not total_weight > 0:
        raise ValueError(f"total_weight must be positive, not {total_weight}")
    gradient: Vector = gradient_sum / np.float32(total_weight)
    grad_norm = norm(gradient)
    if not math.isfinite(grad_norm):
        raise NonFiniteError(
            f"The gradient of the whole step has norm {grad_norm}, though every leaf's was finite: their sum left the "
            "range of float32. No step was taken. Lower train.learning_rate, and look at the loss of the last steps."
        )
    if max_grad_norm > 0:
        scale = max_grad_norm / (grad_norm + CLIP_EPS)
        if scale < 1.0:
            gradient *= np.float32(scale)
    return gradient, grad_norm


def adamw(
    parameters: Vector,
    gradient: Vector,
    moments: Moments,
    *,
    learning_rate: float,
    betas: Sequence[float],
    eps: float,
    weight_decay: float,
) -> tuple[Vector, Moments]:
    """The parameters [P] after one bias-corrected AdamW update, and the state after it.

    https://arxiv.org/abs/1711.05101, by mlx.optimizers on the CPU; its default has no bias correction, and first
    updates of 3 to 5 learning rates. Goes block by block, so that it holds little beside what it returns; an element's
    bits depend on that element alone. Raises ValueError when the lengths differ.
    """
    size = len(parameters)
    if not len(gradient) == len(moments.first) == len(moments.second) == size:
        raise ValueError(
            f"{size} parameters, {len(gradient)} gradients, {len(moments.first)} and {len(moments.second)} moments"
        )
    after = np.empty(size, dtype=np.float32)
    first = np.empty(size, dtype=np.float32)
    second = np.empty(size, dtype=np.float32)
    with mx.stream(mx.cpu):
        for start in range(0, size, BLOCK_ELEMENTS):
            block = slice(start, start + BLOCK_ELEMENTS)
            optimizer = AdamW(learning_rate, list(betas), eps, weight_decay, bias_correction=True)
            state = {"m": mx.array(moments.first[block]), "v": mx.array(moments.second[block])}
            optimizer.state["step"] = mx.array(moments.step, mx.uint64)
            optimizer.state["block"] = state
            updated = optimizer.apply_gradients(
                {"block": mx.array(gradient[block])}, {"block": mx.array(parameters[block])}
            )
            mx.eval(updated, optimizer.state)
            after[block] = np.asarray(updated["block"])
            first[block] = np.asarray(optimizer.state["block"]["m"])
            second[block] = np.asarray(optimizer.state["block"]["v"])
    return after, Moments(moments.step + 1, first, second)
