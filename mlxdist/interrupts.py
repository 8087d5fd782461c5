"""Signals that end a command: the first one interrupts it, and later ones do not disturb what it still has to save."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

AGAIN_SECONDS = 60.0  # after an interrupt; then a signal interrupts again, so that a save that hangs can be left


@contextmanager
def interruptible(clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Lets SIGINT, SIGTERM and (not under nohup) a closed terminal raise KeyboardInterrupt: once, not while it ends.

    After an interrupt the signals are ignored when the block ends: the process is about to end, too.
    """
    interrupted_at = float("-inf")

    def interrupt(number: int, frame: object) -> None:
        nonlocal interrupted_at
        if clock() - interrupted_at >= AGAIN_SECONDS:
            interrupted_at = clock()
            raise KeyboardInterrupt

    # A shell that starts a command in the background has it ignore SIGINT, but a SIGINT that is sent is meant.
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if interrupted_at == float("-inf") else signal.SIG_IGN)
