"""The gradient of a step, from its sum: one division by the whole weight, one clip by the norm.

Shapes: P trainable parameters in manifest order, in blocks of 1 MiB (`protocol.vectors.BLOCK_ELEMENTS`).
"""

import math
from operator import add

import numpy as np
import numpy.typing as npt

from mlxdist.protocol.errors import NonFiniteError
from mlxdist.protocol.tree import fold
from mlxdist.protocol.vectors import BLOCK_ELEMENTS, Vector

CLIP_EPS = 1e-6  # as in torch's clip_grad_norm_ and mlx's clip_grad_norm: keeps the scale finite


def block_square_sum(block: Vector) -> float:
    """Returns the sum of squares of at most BLOCK_ELEMENTS numbers, with the same bits on every machine.

    Squares of float32 are exact in float64. They are added by halving, because numpy's own sum depends on its build.
    """
    squares: npt.NDArray[np.float64] = np.zeros(1 << max(len(block) - 1, 0).bit_length(), dtype=np.float64)
    np.square(block, dtype=np.float64, out=squares[: len(block)])
    while len(squares) > 1:
        middle = len(squares) // 2
        squares = squares[:middle] + squares[middle:]
    return float(squares[0])


def norm(vector: Vector) -> float:
    """Returns the 2-norm of a vector of one number or more: the canonical tree over its blocks' sums of squares."""
    starts = range(0, len(vector), BLOCK_ELEMENTS)
    return math.sqrt(fold([block_square_sum(vector[start : start + BLOCK_ELEMENTS]) for start in starts], add))


def clip(gradient_sum: Vector, total_weight: float, max_grad_norm: float) -> tuple[Vector, float]:
    """Returns the gradient [P] of the whole step, clipped, and its norm before clipping.

    `gradient_sum` [P] is the finished sum, `total_weight` its tokens, pairs or rows. This is the one division of a
    step. `max_grad_norm` = 0 does not clip. Raises NonFiniteError for a sum with NaN or infinity.
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
