"""The faults of a soak test: a plan that is a pure function of its seed, and the code that carries it out."""

import heapq
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random

import psutil

from scripts.local_cluster import LocalCluster, send

NODES, MOST_NODES = 4, 6
TIMING = {  # a fifth of the defaults, so that minutes have the faults of a night
    "beat_seconds": 0.4,
    "suspect_seconds": 1.2,
    "return_seconds": 1.0,
    "dead_seconds": 3.0,
    "data_seconds": 2.0,
    "progress_seconds": 6.0,
    "restart_seconds": 0.2,
    "stop_seconds": 2.0,
}
DEAD, PROGRESS = TIMING["dead_seconds"], TIMING["progress_seconds"]
SLOW_STOPPED, SLOW_RUNNING = 0.09, 0.03  # a slowed worker computes a quarter of the time

# Each kind of fault: its relative frequency, and least and most seconds until SIGCONT or until a new node.
KINDS: dict[str, tuple[int, float, float]] = {
    "kill a worker": (4, 0.0, 0.0),
    "kill a supervisor": (2, 0.2, 4.0),
    "kill a node": (3, 0.2, 4.0),
    "kill two workers": (1, 0.0, 0.0),
    "kill all nodes": (1, 0.5, 3.0),
    "stop a worker for a moment": (2, 0.1, 0.5 * PROGRESS),
    "stop a worker for long": (2, 1.2 * PROGRESS, 3 * PROGRESS),
    "stop a supervisor for a moment": (2, 0.1, 0.8 * DEAD),
    "stop a supervisor for long": (2, 1.2 * DEAD, 4 * DEAD),
    "stop a node for a moment": (2, 0.1, 0.8 * DEAD),
    "stop a node for long": (3, 1.2 * DEAD, 6 * DEAD),
    "slow a worker": (3, 3.0, 10.0),
    "add a node": (2, 0.0, 0.0),
    "ask a node to leave": (1, 0.2, 4.0),
}


@dataclass(frozen=True)
class Fault:
    """One fault of the plan."""

    after: float  # seconds since the previous fault
    kind: str
    node: float  # in [0, 1): chooses one of the nodes that exist then
    seconds: float


def plan(seed: int, mean_seconds: float) -> Iterator[Fault]:
    """Yields faults without end, the same for the same seed."""
    draw = Random(seed)
    kinds, weights = list(KINDS), [weight for weight, _, _ in KINDS.values()]
    while True:
        (kind,) = draw.choices(kinds, weights)
        _, least, most = KINDS[kind]
        yield Fault(draw.expovariate(1 / mean_seconds), kind, draw.random(), draw.uniform(least, most))


@dataclass
class Hurting:
    """Causes the faults of a plan and their follow-ups: SIGCONT, or a new node in place of a lost one."""

    cluster: LocalCluster
    clock: Callable[[], float] = time.monotonic
    done: Counter[str] = field(default_factory=Counter)
    _due: list[tuple[float, int, Callable[[], object]]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)
    _coming: int = 0  # nodes that are to be started

    def act(self) -> float:
        """Does everything that is due. Returns the seconds until something else may be."""
        while self._due and self._due[0][0] <= self.clock():
            heapq.heappop(self._due)[2]()
        alive = self.cluster.alive()
        for name in set(self.cluster.nodes) - set(alive):  # gave up, because its workers had ended too often
            del self.cluster.nodes[name]
        while len(alive) + self._coming < NODES:
            self._start_later(0.5)
        return min(max(self._due[0][0] - self.clock(), 0.0), 0.05) if self._due else 0.05

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Plans an action after so many seconds."""
        heapq.heappush(self._due, (self.clock() + seconds, next(self._numbers), action))

    def hurt(self, fault: Fault) -> None:
        """Causes one fault, if there is a node."""
        names = self.cluster.alive()
        if not names:
            return
        name = names[int(fault.node * len(names))]
        match fault.kind.split():
            case ["kill", "a", part]:
                hit = self._kill(name, part, fault.seconds)
            case ["kill", "two", _]:
                others = [other for other in names if other != name][:1]
                hit = all([self._kill(one, "worker", 0) for one in (name, *others)])
            case ["kill", "all", _]:
                hit = all([self._kill(one, "node", fault.seconds * (1 + at)) for at, one in enumerate(names)])
            case ["stop", "a", part, *_]:
                hit = any([self._stop(one, fault.seconds) for one in self._parts(name, part)])
            case ["slow", "a", _]:
                hit = self._slow(self.cluster.worker(name), self.clock() + fault.seconds)
            case ["add", *_]:
                hit = len(names) + self._coming < MOST_NODES
                if hit:
                    self._start_later(0.0)
            case _:
                hit = send(self.cluster.supervisor(name), signal.SIGTERM)
                self._replace(name, fault.seconds)
        self.done[fault.kind] += hit

    def _parts(self, name: str, part: str) -> list[psutil.Process]:
        worker, supervisor = self.cluster.worker(name), self.cluster.supervisor(name)
        chosen = {"worker": [worker], "supervisor": [supervisor], "node": [supervisor, worker]}[part]
        return [process for process in chosen if process is not None]

    def _kill(self, name: str, part: str, seconds: float) -> bool:
        hit = [send(process, signal.SIGKILL) for process in self._parts(name, part)]
        if part != "worker":
            self._replace(name, seconds)
        return any(hit)

    def _stop(self, process: psutil.Process, seconds: float) -> bool:
        self.later(seconds, lambda: send(process, signal.SIGCONT))
        return send(process, signal.SIGSTOP)

    def _slow(self, worker: psutil.Process | None, until: float) -> bool:
        """Stops a worker again and again until a time."""

        def once() -> None:
            if self.clock() < until and worker is not None and self._stop(worker, SLOW_STOPPED):
                self.later(SLOW_STOPPED + SLOW_RUNNING, once)

        once()
        return worker is not None

    def _replace(self, name: str, seconds: float) -> None:
        """Replaces a node after so many seconds, unless there are enough without it."""
        del self.cluster.nodes[name]  # the process stays in `seen` and ends with all others
        if len(self.cluster.alive()) + self._coming < NODES:
            self._start_later(seconds, name)

    def _start_later(self, seconds: float, name: str = "") -> None:
        self._coming += 1

        def start() -> None:
            self._coming -= 1
            names = (name, *(f"node-{number}" for number in range(1, MOST_NODES + NODES + 1)))
            self.cluster.start_node(next(one for one in names if one and one not in self.cluster.nodes))

        self.later(seconds, start)
