"""mlx's memory limits while a worker serves a run; afterwards they are as before.

mlx does not fail at a limit: near it, it frees the memory that it keeps for reuse, and waits for running work.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import mlx.core as mx
import psutil

CACHE_SHARE = 4  # a node that was given a limit may keep this part of it for reuse


@contextmanager
def memory_limits(limit: int) -> Iterator[int]:
    """Limits mlx to `limit` bytes, at most what the machine has; 0 keeps mlx's own limits. Yields the limit in bytes.

    On a Mac as much memory as the system recommends is wired, so that the model's parameters are not swapped out
    between steps.
    """
    with ExitStack() as undo:

        def use(setter: Callable[[int], int], value: int) -> None:
            undo.callback(setter, setter(value))

        held = min(limit, psutil.virtual_memory().total)
        if held:
            use(mx.set_memory_limit, held)
            use(mx.set_cache_limit, held // CACHE_SHARE)
        if recommended := int(mx.device_info().get("max_recommended_working_set_size", 0)):
            use(mx.set_wired_limit, min(held or recommended, recommended))  # more than recommended is an error
        yield held
