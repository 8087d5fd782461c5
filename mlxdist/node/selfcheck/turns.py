"""Two ways to do the same, measured in turns in one process, so that a busy minute disturbs both."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import mlx.core as mx

Run = Callable[[], object]  # does its work to the end: nothing is left to evaluate

LEAST_ROUNDS = 3  # that count, whatever they take; one where no time is given


@dataclass(frozen=True, slots=True)
class Taken:
    """The seconds of one run, by the clock and of the processor, and its peak of memory above what was held before."""

    seconds: float
    processor_seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Start:
    """The clocks and the bytes held when a run starts; mlx's peak is set back."""

    clock: float
    processor: float
    held: int

    @staticmethod
    def now() -> "Start":
        """Returns the start of a run that begins now."""
        mx.reset_peak_memory()
        return Start(time.perf_counter(), time.process_time(), mx.get_active_memory())

    def taken(self) -> Taken:
        """Returns the time and the memory taken since then."""
        seconds, processor = time.perf_counter() - self.clock, time.process_time() - self.processor
        return Taken(seconds, processor, mx.get_peak_memory() - self.held)


def least_rounds(seconds: float) -> int:
    """Returns the fewest rounds that count in a measurement of `seconds`."""
    return LEAST_ROUNDS if seconds else 1


def in_turns(sides: Mapping[str, Run], seconds: float) -> dict[str, Any]:
    """Runs both sides in turns for about `seconds`, after a first round that does not count; see `compared`."""
    rounds: list[tuple[Taken, ...]] = []
    until = time.monotonic() + seconds
    while len(rounds) <= least_rounds(seconds) or time.monotonic() < until:
        rounds.append(tuple(measured(run) for run in sides.values()))
    return compared(tuple(sides), rounds[1:])


def measured(run: Run) -> Taken:
    """Returns the time and the memory that `run` takes."""
    start = Start.now()
    run()
    return start.taken()


def compared(names: Sequence[str], rounds: Sequence[Sequence[Taken]]) -> dict[str, Any]:
    """Returns the medians of both sides, and the second relative to the first.

    Args:
        names: of the two sides.
        rounds: of each round what the two sides took.

    Returns:
        "times_as_fast": the median over the rounds; "in_processor_time": the same without what other programs took.
        "share_of_memory": of the largest peaks. "sides", "rounds".
    """
    first, second = zip(*rounds, strict=True)
    pairs = list(zip(first, second, strict=True))
    peaks = [max(taken.peak_bytes for taken in side) for side in (first, second)]
    return {
        "times_as_fast": median(a.seconds / b.seconds for a, b in pairs),
        "in_processor_time": sum(a.processor_seconds for a in first) / sum(b.processor_seconds for b in second),
        "share_of_memory": peaks[1] / max(peaks[0], 1),
        "rounds": len(rounds),
        "sides": {
            name: {
                "seconds": median(taken.seconds for taken in side),
                "processor_seconds": median(taken.processor_seconds for taken in side),
                "peak_bytes": peak,
            }
            for name, side, peak in zip(names, (first, second), peaks, strict=True)
        },
    }
