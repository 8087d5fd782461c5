"""Modelled cables in virtual time: the coordinator's and one for each node, shared evenly by the vectors on them.

A switch that never holds anything up lies between. Each connection sends its vectors one after the other, and those of
different nodes share the coordinator's cable evenly in each direction, as TCP does in the mean (max-min fairness). Small
messages pass between the blocks of a vector, so they only wait for the delay of the network.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

UP, DOWN = "up", "down"  # node -> coordinator, coordinator -> node
LEAST_BYTES = 1e-3  # below this a message has left: what is over comes from rounding


@dataclass
class Cable:
    """The vectors of one node's connection in one direction that wait or travel. `limit`: bytes per second."""

    limit: float
    waiting: deque[tuple[float, object]] = field(default_factory=deque)  # (bytes left, parcel), the first one travels


@dataclass
class Direction:
    """All cables in one direction, and the coordinator's, of `limit` bytes per second, which they share."""

    limit: float
    cables: dict[str, Cable] = field(default_factory=dict)
    _rates: dict[str, float] = field(default_factory=dict)  # of the cables that carry something, in bytes per second
    _time: float = 0.0

    def send(self, now: float, name: str, size: float, parcel: object) -> None:
        """Puts a message of `size` bytes behind those on the cable of a node."""
        self._carry(now)
        cable = self.cables[name]
        cable.waiting.append((size, parcel))
        if len(cable.waiting) == 1:
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
        self._rates = fair_rates(self.limit, {n: cable.limit for n, cable in self.cables.items() if cable.waiting})


def fair_rates(limit: float, own: Mapping[str, float]) -> dict[str, float]:
    """Returns the rate of each cable of an `own` limit, when all share a cable of `limit` (max-min fairness).

    What a slow one leaves of its share goes to the others.
    """
    rates, left = {}, limit
    for place, (name, most) in enumerate(sorted(own.items(), key=lambda item: item[1])):
        rates[name] = min(most, left / (len(own) - place))
        left -= 0.0 if math.isinf(left) else rates[name]
    return rates
