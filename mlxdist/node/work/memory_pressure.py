"""Sentences for a worker that is short of memory: the error when there is none left, and the swapping before that."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import psutil

from mlxdist.protocol.budget import cure, describe_leaf
from mlxdist.protocol.errors import NodeError
from mlxdist.protocol.leaves import Leaf

# Texts of mlx's allocators and of Metal; each comes as an ordinary RuntimeError.
OUT_OF_MEMORY = ("unable to allocate", "insufficient memory", "outofmemory", "out of memory", "maximum allowed buffer")
SWAPPED_BYTES = 256 * 2**20  # read back from the disk during one leaf
SLOWER = 2.0  # times its usual seconds per token
REMEMBERED = 32  # leaves
ENOUGH = 4  # leaves, before one can be called slow


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True when an error of mlx means that memory ran out."""
    text = str(error).lower().replace("_", " ")
    return isinstance(error, MemoryError) or any(
        words in text or words in text.replace(" ", "") for words in OUT_OF_MEMORY
    )


@contextmanager
def named_out_of_memory(leaf: Leaf, segment_size: int) -> Iterator[None]:
    """Raises NodeError with the leaf's length and what to change when memory runs out inside."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        first = " ".join(str(error).split())[:200]
        raise NodeError(f"memory ran out at {describe_leaf(leaf)} ({first}); {cure(leaf, segment_size)}") from error


def swapped_in() -> int:
    """Returns the bytes read back from swap since the machine started."""
    return int(psutil.swap_memory().sin)


@dataclass
class SwapWatch:
    """Detects a leaf that took far longer than usual while memory was read back from the disk; reports it once."""

    read: Callable[[], int] = swapped_in
    _paces: list[float] = field(default_factory=list)  # seconds per token
    _before: int = -1
    _reported: bool = False

    def leaf(self, leaf: Leaf, seconds: float, segment_size: int) -> str | None:
        """Takes one computed leaf. Returns a sentence to report, or None."""
        now = self.read()
        swapped, self._before = (now - self._before if self._before >= 0 else 0), now
        tokens = leaf.tokens
        pace, usual = seconds / tokens, median(self._paces) if len(self._paces) >= ENOUGH else 0.0
        self._paces = [*self._paces[1 - REMEMBERED :], pace]
        if self._reported or not usual or pace < SLOWER * usual or swapped < SWAPPED_BYTES:
            return None
        self._reported = True
        return (
            f"swapping: a leaf of {tokens} tokens took {pace / usual:.1f} times as long as usual while "
            f"{swapped / 1e6:.0f} MB were read back from the disk; {cure(leaf, segment_size)}"
        )
