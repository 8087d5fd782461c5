"""The signals that end a command: the first one interrupts, and nothing disturbs what is saved after it."""

import os
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from mlxdist.interrupts import AGAIN_SECONDS, interruptible

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupted(*later: tuple[int, float], first: int = signal.SIGINT) -> list[float]:
    """The times of the interrupts when `first` is sent at 0 and each signal of `later` at its time."""
    now, times = 0.0, []
    with interruptible(lambda: now):
        for number, now in ((first, 0.0), *later):
            try:
                os.kill(os.getpid(), number)
            except KeyboardInterrupt:
                times.append(now)
    os.kill(os.getpid(), first)  # while the process ends
    return times


@pytest.mark.parametrize("first", NUMBERS)
@pytest.mark.parametrize("later", NUMBERS)
def test_a_signal_interrupts_once_and_later_ones_do_nothing_while_it_is_saved(first: int, later: int) -> None:
    assert interrupted((later, 0.0), (later, 1.0), (first, 10.0), first=first) == [0.0]


def test_a_save_that_hangs_can_be_interrupted_again_after_a_minute() -> None:
    times = (AGAIN_SECONDS - 1, AGAIN_SECONDS, AGAIN_SECONDS + 1)
    assert interrupted(*((signal.SIGINT, time) for time in times)) == [0.0, AGAIN_SECONDS]


class Finalized:
    """Is interrupted while it is finalized, where Python drops what is raised."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)


def test_an_interrupt_that_python_drops_is_raised_again(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        with interruptible():
            Finalized()
            time.sleep(5)

    hook = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt):
        work()
    assert sys.unraisablehook is hook
    assert capfd.readouterr().err == ""


def test_without_an_interrupt_the_handlers_are_as_before() -> None:
    before = [signal.getsignal(number) for number in NUMBERS]
    with interruptible():
        assert signal.getsignal(signal.SIGINT) not in before
    assert [signal.getsignal(number) for number in NUMBERS] == before
