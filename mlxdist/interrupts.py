"""Signals that end a command: the first one interrupts it, and later ones do not disturb what it still has to save."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

LOST_SECONDS = 0.05  # until an interrupt that Python has dropped is raised again
AGAIN_SECONDS = 60.0  # after an interrupt; then a signal interrupts again, so that a save that hangs can be left


@contextmanager
def interruptible(clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Lets SIGINT, SIGTERM and (not under nohup) a closed terminal raise KeyboardInterrupt: once, not while it ends.

    After an interrupt the signals are ignored when the block ends: the process is about to end, too. An interrupt that
    came within a finalizer or a callback, where Python prints and drops it, is raised again.
    """
    interrupted_at = float("-inf")

    def interrupt(number: int, frame: object) -> None:
        nonlocal interrupted_at
        if clock() - interrupted_at >= AGAIN_SECONDS:
            interrupted_at = clock()
            raise KeyboardInterrupt

    def dropped(unraisable: "sys.UnraisableHookArgs") -> None:
        nonlocal interrupted_at
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            hook(unraisable)
            return
        interrupted_at = float("-inf")
        again = threading.Timer(LOST_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()

    def printed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):  # pyzmq's compiled code prints one before it drops it
            printer(kind, error, trace)

    # A shell that starts a command in the background has it ignore SIGINT, but a SIGINT that is sent is meant.
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    hook, sys.unraisablehook = sys.unraisablehook, dropped
    printer, sys.excepthook = sys.excepthook, printed
    try:
        yield
    finally:
        sys.unraisablehook, sys.excepthook = hook, printer
        for number, handler in before.items():
            signal.signal(number, handler if interrupted_at == float("-inf") else signal.SIG_IGN)
