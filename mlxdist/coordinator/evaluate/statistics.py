"""The standard error of a loss that is a ratio of two sums over rows."""

import math

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]


def standard_error(losses: Values, weights: Values) -> float | None:
    """Returns the standard error of sum(losses) / sum(weights) over rows [R] that were drawn independently.

    It is the usual one of a ratio estimator, by the residuals of the rows from the ratio: Cochran, Sampling Techniques
    (1977), section 6.4. With equal weights it is that of a mean. None for a single row.
    """
    rows, total = len(losses), math.fsum(weights)
    if rows < 2:
        return None
    residuals = losses - math.fsum(losses) / total * weights
    return math.sqrt(rows / (rows - 1) * math.fsum(residuals**2)) / total
