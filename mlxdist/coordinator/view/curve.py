"""A curve over the steps, and its thinning: as many points as a screen can show, with all that stands out."""

import math
from array import array
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass
class Curve:
    """Values over steps, ascending; NaN where a value was not finite. 16 bytes a point."""

    steps: "array[float]" = field(default_factory=lambda: array("d"))
    values: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, step: float, value: object) -> None:
        """Adds a point; those of this step and later ones go, because they are done again."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()
        self.steps.append(step)
        self.values.append(float(value) if isinstance(value, int | float) else math.nan)

    @property
    def last(self) -> float | None:
        """The last value; None where there is none, or it is not finite."""
        return self.values[-1] if self.values and math.isfinite(self.values[-1]) else None

    def points(self, first: float, last: float, pixels: int) -> tuple[list[float], list[float | None]]:
        """Returns the steps and values in [first, last], one more on each side, thinned to `pixels`; a gap is None."""
        steps, values = np.array(self.steps), np.array(self.values)
        start = max(int(np.searchsorted(steps, first, "left")) - 1, 0)
        stop = int(np.searchsorted(steps, last, "right")) + 1
        kept_steps, kept = thinned(steps[start:stop], values[start:stop], pixels)
        return kept_steps.tolist(), [value if math.isfinite(value) else None for value in kept.tolist()]


def thinned(steps: Floats, values: Floats, pixels: int) -> tuple[Floats, Floats]:
    """Returns at most 3 points for each of `pixels` columns, and both ends: the least, the greatest, and a gap.

    `steps` [N], ascending; `values` [N]. So the picture is that of all points: no peak is lost, and no NaN.
    """
    if len(steps) <= 3 * pixels:
        return steps, values
    width = steps[-1] - steps[0]
    columns = np.minimum((steps - steps[0]) / width * pixels, pixels - 1).astype(np.int64)
    order = np.lexsort((values, columns))  # by column, then by value; NaN comes last
    edges = np.flatnonzero(np.diff(columns[order], prepend=-1))
    known = np.add.reduceat(np.isfinite(values[order]).astype(np.int64), edges)  # finite values of each column
    ends = np.append(edges[1:], len(order)) - 1
    places = np.concatenate([edges, np.maximum(edges + known - 1, edges), ends])
    kept = np.unique(np.concatenate([order[places], [0, len(steps) - 1]]))
    return steps[kept], values[kept]
