"""The part of a step in which Python builds graphs, measured in a worker's own code for scripts/bench_step.py.

Everything that waits for the device goes through `mx.eval` and `mx.async_eval`. What the backward spends outside of
them is building. It costs nothing where the device still computed when Python came back to wait for it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlxdist.node.backward.events import Events
from mlxdist.node.work.compute import Computer

A_WAIT = 50e-6  # seconds by which an evaluation is longer when there was something left to compute


@dataclass
class Clock:
    """Seconds of a worker's thread, added up."""

    waiting: float = 0.0  # in mlx's evaluation: its own work on graphs, and the wait for the device
    building: float = 0.0
    hidden: float = 0.0  # of building, while the device certainly computed
    _open: float | None = None  # `building` when the device was given something that is not waited for yet

    @contextmanager
    def built(self) -> Iterator[None]:
        """Counts what is inside as building, but for the evaluations in it."""
        began, waited = time.perf_counter(), self.waiting
        try:
            yield
        finally:
            self.building += time.perf_counter() - began - (self.waiting - waited)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measures mlx's evaluations in this process."""
        own = mx.eval, mx.async_eval
        mx.eval = self._timed(mx.eval, waits=True)  # type: ignore[assignment]
        mx.async_eval = self._timed(mx.async_eval, waits=False)  # type: ignore[assignment]
        try:
            yield
        finally:
            mx.eval, mx.async_eval = own

    def _timed(self, evaluate: Callable[..., None], *, waits: bool) -> Callable[..., None]:
        def timed(*arrays: Any) -> None:
            began = time.perf_counter()
            evaluate(*arrays)
            seconds = time.perf_counter() - began
            self.waiting += seconds
            if self._open is not None:
                evaluate(*arrays)  # again, with nothing left to do
                if seconds - (time.perf_counter() - began - seconds) > A_WAIT:
                    self.hidden += self.building - self._open
            self._open = None if waits else self.building

        return timed


@dataclass(frozen=True)
class Timed(Computer):
    """A computer that measures the building of its gradients."""

    clock: Clock = field(default_factory=Clock)

    def _backward(self, *asked: Any, **more: Any) -> Events:
        with self.clock.built():
            events = super()._backward(*asked, **more)
        return self._watched(events)

    def _watched(self, events: Events) -> Events:
        while True:
            with self.clock.built():
                event = next(events, None)
            if event is None:
                return
            yield event
            del event


def measure_building(computer: Computer, steps: Sequence[Callable[[Computer], int]]) -> dict[str, float]:
    """Computes steps, each of which returns its number of leaves. Returns shares of their time, and ms of a leaf."""
    timed = Timed(computer.loaded, computer.spec)
    clock, began, leaves = timed.clock, time.perf_counter(), 0
    with clock.watching():
        for step in steps:
            leaves += step(timed)
    seconds = time.perf_counter() - began
    return {
        "share_of_a_step": clock.building / seconds,
        "share_while_the_device_waits": (clock.building - clock.hidden) / seconds,
        "share_in_evaluations": clock.waiting / seconds,
        "ms_of_a_leaf": 1e3 * clock.building / leaves,
        "leaves": leaves,
    }
