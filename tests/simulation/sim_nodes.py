"""Nodes without processes, sockets or mlx, for random histories: real supervisors and sessions, pretended models.

A vector is of small integers, so that sums are exact in any order and every leaf, step, adapter and reference that went
into one can be read off it.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np

from mlxdist.node.link.jobs import ComputeAssignment, Partial, Result
from mlxdist.node.process import Order, Worker
from mlxdist.node.supervisor import Supervisor
from mlxdist.node.work.locate import Locator
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import MismatchError, WireError
from mlxdist.protocol.transport import CONTROL
from mlxdist.protocol.tree import Span
from mlxdist.protocol.vectors import Vector
from mlxdist.protocol.wire import Frames, decode
from tests.coordinator.cluster.scripted_node import CANARY
from tests.memory_cluster import MemoryCluster
from tests.memory_nodes import MemoryWorker, PretendedEngine, WorkerEndedError

MOST_LEAVES = 12
ELEMENTS = MOST_LEAVES + 3
MANIFEST = manifests.make({"layers.0.lora_a": (ELEMENTS, 1)})
WAIT_SECONDS = 12 * 3600.0
ODD = "odd-"  # begins the name of a node of another bit class
BARE = "bare-"  # begins the name of a node without the model
LIES = ("nan", "nan outputs", "shape", "no leaf of its own", "no partial")


def gradient_of(leaves: Span, step: int, adapter: float, reference: float) -> Vector:
    """The sum over these leaves of what each brings: itself, its step, and with what it was computed."""
    vector = np.zeros(ELEMENTS, np.float32)
    vector[leaves.start : leaves.stop] = 1
    vector[MOST_LEAVES:] = np.array([step, adapter, reference], np.float32) * len(leaves)
    return vector


def numbers_of(leaf: int, step: int, adapter: float, reference: float) -> Vector:
    """A leaf's row outputs, one row."""
    return np.array([leaf, step, adapter, reference], np.float32)


def _origin(job: ComputeAssignment) -> tuple[int, float, float]:
    """The step, adapter and reference of a job."""
    reference = float(job.reference[0]) if job.reference is not None else 0.0
    return job.assignment.step, float(job.adapter[0]), reference


class Surroundings(MemoryCluster, ABC):
    """The world as a node needs it: the time, wires, and what is wrong with the leaves."""

    @abstractmethod
    def new_pid(self) -> int:
        """A new pid."""

    @abstractmethod
    def lied(self, worker: "SimWorker", span: Span | None) -> None:
        """Notes a wrong answer; `span`: of these leaves it said NaN."""

    @abstractmethod
    def fate(self, worker: "SimWorker", leaf: int) -> str:
        """The fate of a worker at a leaf: "crash", "nan" or ""."""

    @abstractmethod
    def models_of(self, node: str) -> Path:
        """The folder for models on a node's disk."""


class SimWorker(MemoryWorker, Worker):
    """A worker as its supervisor and the world see it: it may stop, get slow, or end."""

    def __init__(self, world: Surroundings, name: str, models: Path | None = None) -> None:
        """`models`: its folder for models that come from the coordinator; None: it has the model."""
        self.pid = world.new_pid()
        self.exit: str | None = None
        process = SimpleNamespace(pid=self.pid, poll=lambda: self.exit, stdin=None, stdout=None)
        Worker.__init__(self, process)  # type: ignore[arg-type]
        engine = PretendedEngine(
            MANIFEST,
            gradient=lambda job, leaf: gradient_of(Span(leaf, leaf + 1), *_origin(job)),
            row_outputs=lambda job, leaf: numbers_of(leaf, *_origin(job)),
            fate=lambda leaf: world.fate(self, leaf),
            canary=("other",) * 3 if name.startswith(ODD) else CANARY,
            locator=Locator(models, margin=0) if models is not None else None,
        )
        self.locator = engine.locator
        MemoryWorker.__init__(self, name, world, engine)
        self.slow = False
        self.world = world
        self.bad = self.doomed = False  # the next leaf gives NaN; the next leaf is the last
        self.lie = ""  # how its next answer or partial is wrong: one of LIES
        self.disturbed = False  # something of it was lost or damaged on the way

    # ---- for its supervisor

    def order(self, order: Order) -> None:
        """Goes to a coordinator, with this session."""
        if self.exit is None:
            self.begin(order.session)

    def cause_of_exit(self) -> str | None:
        """The reason why it ended, if it has."""
        return self.exit

    def stop(self) -> None:
        """Ends with its supervisor."""
        self.end("stopped")

    def kill(self) -> None:
        """Ends at once."""
        self.end("killed (SIGKILL)")

    def end(self, cause: str) -> None:
        """The process ends."""
        if self.exit is None:
            self.exit = cause
            self.hang_up()
            if self.locator is not None:
                self.locator.close()

    # ---- what it does

    @property
    def can_work(self) -> bool:
        """True if it has anything to do."""
        return self.exit is None and super().can_work

    def hear(self, frames: Frames) -> None:
        """Takes one message. A real worker ends at one that makes no sense, and so does this one."""
        if self.exit is None:
            try:
                super().hear(frames)
            except (WireError, MismatchError) as error:
                if not self.disturbed:
                    raise AssertionError(f"{self.name} was sent what makes no sense: {error}") from error
                self.end("exit code 1")

    def step(self) -> Result | None:
        """Computes one leaf, or answers."""
        self.leaf_seconds = 5.0 if self.slow else 0.5
        try:
            return super().step()
        except WorkerEndedError as error:
            self.end(str(error))
            return None

    def altered(self, result: Result | None) -> Result | None:
        """A wrong answer of a worker that is broken, or an enemy: no check of its own has found it."""
        match self.lie, result:
            case "nan", Partial():
                vector = result.vector.copy()
                vector[0] = np.nan
                self._lied(result.span)
                return replace(result, vector=vector)
            case "nan outputs", (m.LeafAnswer() as answer, payload):
                self._lied(Span(answer.leaf, answer.leaf + 1))
                return answer, np.full(len(payload) // 4, np.nan, np.float32).tobytes()
            case "shape", (m.LeafAnswer() as answer, payload):
                self._lied()
                return answer, payload[:-4]
            case "no leaf of its own", (m.LeafAnswer() as answer, payload):
                self._lied()
                return msgspec.structs.replace(answer, leaf=10**6), payload
            case "no partial", Partial():
                self._lied()
                return None
        return result

    def _lied(self, span: Span | None = None) -> None:
        self.lie = ""
        self.world.lied(self, span)


class SimSupervisor(Supervisor):
    """A real supervisor whose turns, clock and end the world decides."""

    worker: SimWorker | None

    def __init__(self, world: Surroundings, name: str, *, launched: bool = False) -> None:
        self.pid = world.new_pid()
        self.ahead = 0.0  # seconds by which its clock has jumped
        self.stopped = False
        self.wire = world.connect(CONTROL, f"{name}/{self.pid}".encode())
        models = world.models_of(f"{name}-{self.pid}") if name.startswith(BARE) else None
        super().__init__(
            name,
            "nowhere",
            self.wire,
            launched=launched,
            wait_seconds=WAIT_SECONDS,
            clock=lambda: world.now + self.ahead,
            start_worker=lambda environment: SimWorker(world, name, models),
        )

    def turn(self) -> None:
        """Takes what has arrived, then looks at the worker and the clock, as `run` does."""
        for frames in self.link.receive(0.0):
            self.heard, self.unanswered = self.clock(), None
            self._handle(decode(frames)[0])
        if self.exit_code is None:
            self._tick()
        if self.exit_code is not None:
            self.leave(self.reason)

    def leave(self, reason: str) -> None:
        """Ends as a supervisor does that was told to."""
        if self.session is not None and self.wire.open:
            self._send(m.Leave(self.session))
        self.end(reason)

    def end(self, reason: str) -> None:
        """The process ends, and its worker with it."""
        self._leave(1, reason)
        self.wire.close()
        if self.worker is not None:
            self.worker.stop()
