"""Work that is done again and again on a thread of its own."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def ticking(tick: Callable[[], None], seconds: float) -> Iterator[None]:
    """Calls `tick` every so many seconds while the block lasts."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            tick()

    thread = threading.Thread(target=run, name="ticks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
