"""The random numbers of the data order: mulberry32 and Fisher-Yates, with the same bits on every machine."""

from collections.abc import Callable, MutableSequence
from typing import TypeVar

T = TypeVar("T")

_WORD = 0xFFFFFFFF


def mulberry32(seed: int) -> Callable[[], float]:
    """Returns a generator of numbers in [0, 1) with 32 bits each, from `seed` modulo 2**32; 0 stands for 1."""
    state = seed & _WORD or 1

    def draw() -> float:
        nonlocal state
        state = (state + 0x6D2B79F5) & _WORD
        mixed = ((state ^ state >> 15) * (state | 1)) & _WORD
        mixed ^= (mixed + (mixed ^ mixed >> 7) * (mixed | 61)) & _WORD
        return (mixed ^ mixed >> 14) / 4294967296

    return draw


def fisher_yates(items: MutableSequence[T], draw: Callable[[], float]) -> None:
    """Shuffles `items` in place from the last down, with one draw for each but the first."""
    for last in range(len(items) - 1, 0, -1):
        other = int(draw() * (last + 1))
        items[last], items[other] = items[other], items[last]
