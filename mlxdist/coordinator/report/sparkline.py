"""A curve in one line of text: the mean of each part of it as a block, the highest one full."""

from collections.abc import Sequence
from itertools import pairwise

BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.-~=+*#"
NOT_FINITE = "!"


def sparkline(values: Sequence[float | None], width: int, *, ascii_only: bool = False) -> str:
    """Returns at most `width` signs for the values, None being one that is not finite; "" where there is none."""
    parts = thinned(values, width)
    known = [part for part in parts if part is not None]
    if not known:
        return NOT_FINITE * len(parts)
    signs, low, high = ASCII if ascii_only else BLOCKS, min(known), max(known)
    scale = (len(signs) - 1) / (high - low) if high > low else 0.0
    return "".join(NOT_FINITE if part is None else signs[round((part - low) * scale)] for part in parts)


def thinned(values: Sequence[float | None], width: int) -> list[float | None]:
    """Returns the values, or the means of `width` equal parts of them; a part with one that is not finite is None."""
    if len(values) <= width:
        return list(values)
    edges = [len(values) * number // width for number in range(width + 1)]
    parts = [values[start:stop] for start, stop in pairwise(edges)]
    return [None if None in part else sum(filter(None, part)) / len(part) for part in parts]
