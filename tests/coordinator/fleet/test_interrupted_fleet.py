"""A Ctrl-C in any moment of the loop's questions leaves the fleet in a state in which it can be closed."""

import signal
import threading
from collections.abc import Sequence
from types import FrameType

from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.protocol.transport import Parcel, Refusal
from tests.coordinator.cluster.scripted_node import new_cluster

INTERRUPTS = 80
PATIENCE_SECONDS = 20.0


class QuietHub:
    """Ports at which nothing happens, looked at again and again."""

    def receive(self, timeout: float) -> Sequence[Parcel]:
        threading.Event().wait(0.0002)
        return []

    def take_refusals(self) -> list[Refusal]:
        return []

    def admitted(self, waiting: int) -> None:
        pass

    def send(self, parcel: Parcel) -> bool:
        return True

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


class InterruptError(BaseException):
    """The exception that the signal raises."""


def interrupt(number: int, frame: FrameType | None) -> None:
    raise InterruptError


def free_for_others(lock: threading.RLock) -> bool:
    """True if another thread gets the lock."""
    got: list[bool] = []

    def take() -> None:
        got.append(lock.acquire(timeout=PATIENCE_SECONDS))
        if got[0]:
            lock.release()

    other = threading.Thread(target=take)
    other.start()
    other.join()
    return got[0]


def test_an_interrupt_in_any_moment_leaves_the_messages_thread_at_work() -> None:
    fleet = Fleet(new_cluster(), QuietHub())
    before = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        for count in range(INTERRUPTS):
            try:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0.0005 + count % 97 * 1e-5)
                while True:
                    fleet.present()
                    fleet.leaves_recomputed()
            except InterruptError:
                pass
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            assert free_for_others(fleet._lock), f"after {count} interrupts"
    finally:
        signal.signal(signal.SIGVTALRM, before)
    fleet.close("the test is over")
