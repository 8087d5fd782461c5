"""Modelled cables in virtual time: the coordinator's and one for each node, shared evenly by the vectors on them.

A switch that never holds anything up lies between. Each connection sends its vectors one after the other, and those of
different nodes share the coordinator's cable by weight in each direction (max-min fairness). With equal weights that is
TCP in the mean; with drawn ones it is TCP on a short queue, where some connections are ahead of others for a while.
Small messages pass between the blocks of a vector, so they only wait for the delay of the network.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

UP, DOWN = "up", "down"  # node -> coordinator, coordinator -> node
LEAST_BYTES = 1e-3  # below this a message has left: what is over comes from rounding


@dataclass
class Cable:
    """The vectors of one node's connection in one direction that wait or travel. `limit`: bytes per second.

    `weight`: of the one that travels, where all share the coordinator's cable.
    """

    limit: float
    weight: float = 1.0
    waiting: deque[tuple[float, object]] = field(default_factory=deque)  # (bytes left, parcel), the first one travels


@dataclass
class Direction:
    """All cables in one direction, and the coordinator's, of `limit` bytes per second, which they share."""

    limit: float
    cables: dict[str, Cable] = field(default_factory=dict)
    uneven: float = 0.0  # the standard deviation of the logarithm of a vector's weight
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    _rates: dict[str, float] = field(default_factory=dict)  # of the cables that carry something, in bytes per second
    _time: float = 0.0

    def send(self, now: float, name: str, size: float, parcel: object) -> None:
        """Puts a message of `size` bytes behind those on the cable of a node."""
        self._carry(now)
        cable = self.cables[name]
        cable.waiting.append((size, parcel))
        if len(cable.waiting) == 1:
            cable.weight = math.exp(self.uneven * self.random.standard_normal())
            self._share()

    def next_end(self) -> float:
        """Returns the time when the next message has left; infinity when none is under way."""
        ends = (self.cables[name].waiting[0][0] / rate for name, rate in self._rates.items())
        return self._time + min(ends, default=math.inf)

    def take(self, now: float) -> list[tuple[str, object]]:
        """Returns the messages that have left by now, with the node's name, in order."""
        self._carry(now)
        left = []
        for name in list(self._rates):
            waiting = self.cables[name].waiting
            while waiting and waiting[0][0] <= LEAST_BYTES:
                left.append((name, waiting.popleft()[1]))
        if left:
            self._share()
        return left

    def cut(self, now: float, name: str) -> None:
        """Loses all that is on a node's cable."""
        self._carry(now)
        self.cables[name].waiting.clear()
        self._share()

    def _carry(self, now: float) -> None:
        """Moves what is under way up to `now`."""
        for name, rate in self._rates.items():
            size, parcel = self.cables[name].waiting[0]
            moved = size if math.isinf(rate) else rate * (now - self._time)
            self.cables[name].waiting[0] = (size - moved, parcel)
        self._time = now

    def _share(self) -> None:
        used = {name: (cable.limit, cable.weight) for name, cable in self.cables.items() if cable.waiting}
        self._rates = fair_rates(self.limit, used)


def fair_rates(limit: float, own: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Returns the rate of each cable by its own limit and weight, when all share a cable of `limit`.

    What a slow one leaves of its share goes to the others (max-min fairness).
    """
    rates, left, weights = {}, limit, sum(weight for _, weight in own.values())
    for name, (most, weight) in sorted(own.items(), key=lambda item: item[1][0] / item[1][1]):
        rates[name] = min(most, left * min(weight / weights, 1.0))
        left -= 0.0 if math.isinf(left) else rates[name]
        weights -= weight
    return rates
