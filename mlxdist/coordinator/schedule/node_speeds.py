"""Measured speeds of the nodes, and the estimates that assignments are made with.

A node has seconds per token by width (attention grows faster than the row), and seconds per vector on its link, each
way. Assignments are made with estimates that are kept while no node's share of a step would take 10 % more or less, so
that noise does not move them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from mlxdist.coordinator.schedule.assign import NodeSeconds

MEMORY = 0.7  # share of the old estimate that a new measurement leaves
STEADY = 1.1  # what is within this ratio has not moved, or is equal
SCORE_SHARE = 1 / 3  # of a gradient's time: one forward of forward and two-part backward; until it is measured
PARTIAL_SECONDS = 0.01  # what one more partial per step is taken to cost, until a link is measured
SURE = 2  # leaves of a width after which their time is believed: the first one compiles kernels
GRADIENT = "gradient"

LeafWork = tuple[int, int]  # a leaf's tokens, and those of its longest row: its width


def width_class(width: int) -> int:
    """Widths within a factor of about 1.4 of each other share an estimate."""
    return round(2 * math.log2(max(width, 1)))


@dataclass
class Speed:
    """Measurements of one node, in seconds; 0 = not measured yet."""

    tokens_per_second: float = 0.0  # of gradients of all widths: what a person is told
    up: float = 0.0  # a partial, from its first credit and its last leaf's answer to its END
    down: float = 0.0  # the adapter, from its offer to its receipt
    _per_token: dict[tuple[str, int], float] = field(default_factory=dict)  # by verb and class of width
    _measured: dict[tuple[str, int], int] = field(default_factory=dict)
    _doubted: set[str] = field(default_factory=set)

    def leaf(self, verb: str, size: LeafWork, seconds: float) -> None:
        """Measures a leaf: (tokens, those of its longest row), and its seconds."""
        if not 0 < seconds < math.inf:
            return
        tokens, width = size
        key, doubted = (verb, width_class(width)), self._was_doubted("leaf")
        if doubted:
            self._per_token, self._measured = {}, {}
        known, times = self._per_token.get(key, 0.0), self._measured.get(key, 0)
        each = seconds / tokens
        # The first leaf of a width compiles kernels: a faster second one says more.
        replaced = not times or (times == 1 and each < known)
        self._per_token[key] = each if replaced else MEMORY * known + (1 - MEMORY) * each
        self._measured[key] = SURE if doubted else times + 1
        if verb == GRADIENT:
            self.tokens_per_second = _moved(
                self.tokens_per_second, tokens / seconds, doubted or (times == 1 and replaced)
            )

    def sent_up(self, seconds: float) -> None:
        """Measures the seconds of a partial on its way."""
        if 0 < seconds < math.inf:
            self.up = _moved(self.up, seconds, self._was_doubted("up"))

    def sent_down(self, seconds: float) -> None:
        """Measures the seconds of an adapter on its way."""
        if not 0 < seconds < math.inf:
            return
        before, doubted = self.down, self._was_doubted("down")
        self.down = _moved(before, seconds, doubted)
        if doubted and before and "up" in self._doubted:
            self.up *= self.down / before  # the same link: its other direction has changed alike, until it is measured

    def doubt(self) -> None:
        """Lets the next measurements replace the old ones, which were long ago."""
        self._doubted = {"leaf", "up", "down"}

    def per_token(self, verb: str, width: int) -> float:
        """Seconds per token of a leaf of this width, from the nearest width that was measured; 0 when none was."""
        wanted = width_class(width)
        sure = (key for key, times in self._measured.items() if key[0] == verb and times >= SURE)
        near = min(sure, key=lambda key: abs(key[1] - wanted), default=None)
        if near is not None:
            return self._per_token[near]
        return 0.0 if verb == GRADIENT else SCORE_SHARE * self.per_token(GRADIENT, width)

    @property
    def known(self) -> bool:
        """True if a time of this node is believed."""
        return any(times >= SURE for times in self._measured.values())

    def copy(self) -> "Speed":
        """A copy of the present measurements."""
        return Speed(self.tokens_per_second, self.up, self.down, dict(self._per_token), dict(self._measured))

    def _was_doubted(self, what: str) -> bool:
        """Ends a doubt; true if there was one."""
        doubted = what in self._doubted
        self._doubted.discard(what)
        return doubted


def _moved(known: float, new: float, whole: bool) -> float:
    return new if whole or not known else MEMORY * known + (1 - MEMORY) * new


@dataclass
class Pacing:
    """The estimates that assignments are made with, by node."""

    held: dict[str, Speed] = field(default_factory=dict)

    def seconds(
        self, verb: str, sizes: Sequence[LeafWork], speeds: Mapping[str, Speed], here: Iterable[str] = ()
    ) -> dict[str, NodeSeconds]:
        """The seconds that each node would take for each leaf, in the order of `speeds`.

        A node not measured yet is as fast as the mean of the others; those within 10 % of each other count as equal.
        `here`: the nodes that have the adapter already.
        """
        share = max(len(speeds), 1)
        tokens: Counter[int] = Counter()  # of the step, by width
        for each, width in sizes:
            tokens[width] += each
        if any(
            _has_moved(_estimate(verb, tokens, self.held.get(name), share), _estimate(verb, tokens, speed, share))
            for name, speed in speeds.items()
        ):
            self.held |= {name: speed.copy() for name, speed in speeds.items()}
        held = {name: self.held.get(name, Speed()) for name in speeds}

        rates = {name: {width: speed.per_token(verb, width) for width in tokens} for name, speed in held.items()}
        known = {
            name: [each * rate[width] for each, width in sizes] for name, rate in rates.items() if all(rate.values())
        }
        mean = (
            [fmean(each) for each in zip(*known.values(), strict=True)] if known else [float(each) for each, _ in sizes]
        )
        up = fmean([speed.up for speed in held.values() if speed.up] or [PARTIAL_SECONDS])
        down = fmean([speed.down for speed in held.values() if speed.down] or [0.0])
        ups = {name: (speed.up or up) if verb == GRADIENT else 0.0 for name, speed in held.items()}
        downs = {name: speed.down or down for name, speed in held.items()}
        shares = [downs[name] + sum(known.get(name, mean)) / share + ups[name] for name in held]
        if max(shares) <= STEADY * min(shares):
            known, ups, downs = {}, dict.fromkeys(held, fmean(ups.values())), dict.fromkeys(held, fmean(downs.values()))
        return {
            name: NodeSeconds(known.get(name, mean), ups[name], 0.0 if name in set(here) else downs[name])
            for name in held
        }


def _estimate(verb: str, tokens: Mapping[int, int], speed: Speed | None, share: int) -> float:
    """Seconds for an even share of the leaves, `tokens` by their width, link included; 0 where nothing is known."""
    if speed is None:
        return 0.0
    return speed.down + sum(each * speed.per_token(verb, width) for width, each in tokens.items()) / share + speed.up


def _has_moved(before: float, now: float) -> bool:
    return max(before, now) > STEADY * min(before, now)


@dataclass
class TransferTimes:
    """The begin of each vector under way, by node and (direction, stream), and the adapter version that it is."""

    _began: dict[str, dict[tuple[str, int], tuple[float, int]]] = field(default_factory=dict)

    def begin(self, way: str, name: str, stream: int, now: float, version: int = -1) -> None:
        """Starts to time a vector that may travel from now on."""
        self._began.setdefault(name, {})[way, stream] = now, version

    def end(self, way: str, name: str, stream: int, now: float) -> tuple[float, int]:
        """The seconds that a vector took (0 where its begin was not seen), and its version."""
        mine = self._began.get(name, {})
        began, version = mine.pop((way, stream), (now, -1))
        if not mine:
            self._began.pop(name, None)
        return now - began, version

    def under_way(self, name: str) -> bool:
        """True while a vector travels to or from this node."""
        return name in self._began

    @property
    def any_down(self) -> bool:
        """True while a vector travels to a node."""
        return any(way == "down" for mine in self._began.values() for way, _ in mine)

    def forget(self) -> None:
        """Forgets the times that are being taken: the clock ran while nothing could travel."""
        self._began.clear()

    def drop(self, name: str) -> None:
        """Forgets what is under way to and from this node."""
        self._began.pop(name, None)
