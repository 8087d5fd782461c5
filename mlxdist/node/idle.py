"""Work only while no one uses this Mac: it is free after some minutes without a touch, and in use at the first one."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlxdist.macos import Use, use_of_this_mac
from mlxdist.protocol.errors import UserError

FREE_SECONDS = 300.0  # without a key or the mouse
LOOK_SECONDS = 2.0

Look = Callable[[], Use]


def is_free(use: Use) -> bool:
    """Returns True for a machine that no one uses. Raises UserError where it does not say when it was last used."""
    if use.idle_seconds is None:
        raise UserError(
            "--while-idle needs to know when this Mac was last used, and it does not say: leave --while-idle out"
        )
    return use.idle_seconds >= FREE_SECONDS and use.on_battery is not True


def is_used(use: Use) -> bool:
    """Returns True for a machine that someone uses again, or that has lost its power; unknown is not used."""
    touched = use.idle_seconds is not None and use.idle_seconds < FREE_SECONDS
    return touched or use.on_battery is True


def wait_until_free(look: Look = use_of_this_mac, seconds: float = LOOK_SECONDS) -> None:
    """Returns when no one uses this machine any more. Raises UserError where it does not say."""
    pause = threading.Event()
    while not is_free(look()):
        pause.wait(seconds)


@contextmanager
def used_again(look: Look = use_of_this_mac, seconds: float = LOOK_SECONDS) -> Iterator[threading.Event]:
    """Gives an event that is set when someone uses this machine while the block lasts."""
    used, over = threading.Event(), threading.Event()

    def watch() -> None:
        while not over.wait(seconds):
            if is_used(look()):
                used.set()
                return

    thread = threading.Thread(target=watch, name="use", daemon=True)
    thread.start()
    try:
        yield used
    finally:
        over.set()
        thread.join()
