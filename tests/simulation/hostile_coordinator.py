"""A hostile coordinator against a node: real sessions and supervisors, with frames in any order and mutated values.

The laws: only errors of ours leave a handler, and what a session or a supervisor keeps is bounded.
"""

import hashlib
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mlxdist.node.link.jobs import Finish, Job, TakeBlock
from mlxdist.node.link.session import MOST_JOBS, MOST_VECTORS, Session
from mlxdist.node.process import Worker
from mlxdist.node.supervisor import Supervisor
from mlxdist.node.work.locate import Locator
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import MlxdistError, WireError
from mlxdist.protocol.model_files import WINDOW
from mlxdist.protocol.numerics import WORKER_ENVIRONMENT
from mlxdist.protocol.transport import CONTROL
from mlxdist.protocol.untrusted import worker_environment
from mlxdist.protocol.vectors import digest
from mlxdist.protocol.wire import Frames, decode, encode
from tests.coordinator.cluster.scripted_node import SPEC
from tests.memory_nodes import PretendedEngine, Wire, WorkerEndedError
from tests.protocol.example_messages import MESSAGE_TYPES
from tests.simulation.hostile_words import Words
from tests.simulation.sim_nodes import ELEMENTS, MANIFEST, numbers_of

SESSION = m.SessionId("run", 1, "0" * 32)
TO_WORKERS = (
    *(m.Assignment, m.LeafRows, m.VectorOffer, m.VectorBlock, m.VectorEnd) * 3,
    *(m.Credit, m.Received, m.Cancel, m.Ping, m.ModelFiles, m.FileBlock) * 2,
    *(m.Welcome, m.Canary, m.Stale),
)
TO_SUPERVISORS = (m.Accept, m.Accept, m.HeartbeatAck, m.Restart, m.Stale, m.Shutdown)
FILE = m.ModelFile("model.safetensors", 5, hashlib.sha256(bytes(5)).hexdigest())
KNOWN: dict[str, Sequence[Any]] = {
    "session": [["run", 1, "0" * 32]],
    "step": [1],
    "attempt": [1, 2],
    "adapter_version": [0, 0, 1],
    "leaf": [0, 1, 2],
    "start": [0, 1],
    "stop": [1, 2, 3],
    "total": [3, 4],
    "verb": ["gradient", "score"],
    "kind": ["adapter", "adapter", "reference"],
    "elements": [ELEMENTS],
    "slice_start": [0],
    "slice_stop": [ELEMENTS],
    "stream": range(4),
    "index": [0, 0, 1],
    "upto": [0, 1, 8],
    "branches": [0, 2, -1],
    "lengths": [[1], [1, 1], [4, 4]],
    "row_ids": [[0], [0, 1]],
    "row_inputs": [{}],
    "over": [False] * 9 + [True],
    "digest": [digest(np.zeros(ELEMENTS, np.float32)), FILE.sha256],
    "files": [[["config.json", 5, FILE.sha256]], [["../x.json", 5, FILE.sha256]], []],
    "name": ["config.json", "model.safetensors", "../x.json", "/x.json"],
    "model": ["/nowhere"],
    "size": [5, 5, 0, 2**39],
    "sha256": [FILE.sha256],
    "file": [0, 0, 1],
    "block": [0, 0, 1],
    "environment": [dict(WORKER_ENVIRONMENT)] * 9 + [{"PATH": "/x"}],
    "worker_pid": [0, 1],
}


@dataclass
class BesiegedWorker:
    """A worker's session, which is begun again whenever it ends, and computes what it is asked."""

    words: Words
    disk: Path  # an empty folder
    sent: Counter[str] = field(default_factory=Counter)
    sessions: int = 0
    session: Session = field(init=False)
    honest: Iterator[Frames] = field(init=False)

    def __post_init__(self) -> None:
        self.engine = PretendedEngine(
            MANIFEST,
            gradient=lambda job, leaf: np.zeros(ELEMENTS, np.float32),
            row_outputs=lambda job, leaf: numbers_of(leaf, 1, 0.0, 0.0),
            locator=Locator(self.disk / "models", margin=0),
        )
        self._begin()

    def _begin(self) -> None:
        self.sessions += 1
        self.session, self.honest = Session("a", SESSION, elements=ELEMENTS), self._plausible()

    def attack(self) -> None:
        """Takes one hostile message, computes now and then, and sends."""
        rng = self.words.rng
        kinds = TO_WORKERS if rng.random() < 0.95 else MESSAGE_TYPES
        frames = next(self.honest) if rng.random() < 0.7 else self.words.frames(kinds)
        try:
            message, payload = decode(frames)
        except WireError:
            self.sent["no message"] += 1
            return
        self.sent[type(message).__name__] += 1
        try:
            self.session.handle(message, payload)
        except MlxdistError:
            self._begin()  # a worker ends at an error of ours, and says which
            return
        if rng.random() < 0.3 and self.session.jobs:
            self._compute(self.session.next_job(), rng.randrange(1, 9))
        for answer, payload_ in self.session.take_outgoing():
            encode(answer, payload_)
        self._look()
        if self.session.over or rng.random() < 0.002:
            self._begin()

    def _plausible(self) -> Iterator[Frames]:
        """Yields what an honest coordinator would say: the model, then adapters and assignments without end."""
        zeros = np.zeros(ELEMENTS, np.float32)
        yield encode(m.Welcome(SESSION, msgspec.structs.replace(SPEC, model="/nowhere")))
        yield encode(m.ModelFiles(SESSION, (FILE,)))
        yield encode(m.FileBlock(SESSION, 0, 0, "1", FILE.sha256), bytes(5))
        yield encode(m.Canary(SESSION))
        for step in count():
            offer = m.VectorOffer(SESSION, step + 9, "adapter", step, ELEMENTS, slice_stop=ELEMENTS)
            yield encode(offer)
            yield encode(m.VectorBlock(SESSION, offer.stream, 0), zeros.tobytes())
            yield encode(m.VectorEnd(SESSION, offer.stream, digest(zeros)))
            yield encode(m.Assignment(SESSION, "gradient", step, step, step, 0, 2, 2, "sft", "current", {}))
            for leaf in range(2):
                yield encode(m.LeafRows(SESSION, step, step, leaf, (2,), (leaf,), (2,)), bytes(10))
            for stream in (1, 2):
                yield encode(m.Credit(SESSION, stream, 8))
                yield encode(m.Received(SESSION, stream, whole=self.words.rng.random() < 0.8))

    def _compute(self, job: Job, most: int) -> None:
        if isinstance(job, Finish):
            self._begin()
            return
        results = self.engine.perform(job, SESSION, lambda sentence: None)
        try:
            for _, result in zip(range(most), results, strict=False):
                if not self.session.deliver(result):
                    break
        except WorkerEndedError:
            pass
        results.close()
        self.session.done()

    def _look(self) -> None:
        session = self.session
        assert len(session._incoming) <= MOST_VECTORS
        assert len(session._adapters) <= 1
        assert len(session.jobs) + len(session._arriving) <= MOST_JOBS
        assert len(session._cancelled) <= 1
        assert sum(isinstance(job, TakeBlock) for job in session.jobs) <= WINDOW

    def look_at_disk(self) -> None:
        """Nothing stands but where models belong, and what is whole has its hash."""
        for path in (each for each in self.disk.rglob("*") if each.is_file() and each.name != ".lock"):
            assert path.parent.parent == self.disk / "models", path
            assert path.suffix == ".part" or path.read_bytes() in (b"", bytes(5)), path

    def close(self) -> None:
        """Lets go of its files."""
        assert self.engine.locator is not None
        self.engine.locator.close()


class PretendedWorker(Worker):
    """A worker process of which only the orders count."""

    def __init__(self) -> None:
        self.exit: str | None = None
        process: Any = _Process(self)
        super().__init__(process)

    def order(self, *words: object) -> None:
        """Takes an order."""
        self.given += 1

    def cause_of_exit(self) -> str | None:
        """Returns the cause of its end."""
        return self.exit

    def stop(self) -> None:
        """Ends."""
        self.exit = "stopped"

    kill = stop

    def close_pipes(self) -> None:
        """Has none."""


@dataclass
class _Process:
    worker: PretendedWorker
    pid: int = 1

    def poll(self) -> str | None:
        return self.worker.exit


@dataclass
class HostileLink(Wire):
    """A connection on which a hostile coordinator speaks for a while; each wait moves the clock."""

    words: Words = field(default_factory=lambda: Words(random.Random(0)))
    left: int = 50
    now: float = 0.0
    orphaned: threading.Event = field(default_factory=threading.Event)
    sent: Counter[str] = field(default_factory=Counter)

    def receive(self, timeout: float) -> list[Frames]:
        """Returns a few hostile messages; after the last one the launcher is gone."""
        rng = self.words.rng
        self.now += timeout if rng.random() < 0.9 else rng.choice((0.0, 60.0, 3600.0))
        self.up.clear()
        self.left -= 1
        if self.left <= 0:
            self.orphaned.set()
        kinds = TO_SUPERVISORS if rng.random() < 0.97 else MESSAGE_TYPES
        some = [self.words.frames(kinds) for _ in range(rng.randrange(3))]
        # Frames that are no message end a supervisor, as they should; most of it is to go on.
        some = [frames for frames in some if self._reads(frames) or rng.random() < 0.02]
        return some

    def _reads(self, frames: Frames) -> bool:
        try:
            message, _ = decode(frames)
        except WireError:
            return False
        self.sent[type(message).__name__] += 1
        return not isinstance(message, m.Reject)


def besiege_supervisor(words: Words) -> Counter[str]:
    """Runs a supervisor against a hostile coordinator until it leaves. Returns the messages by their type."""
    link = HostileLink(CONTROL, b"a", words=words)
    workers: list[PretendedWorker] = []

    def start(environment: Any) -> Worker:
        assert worker_environment(environment) == environment
        workers.append(PretendedWorker())
        return workers[-1]

    supervisor = Supervisor(
        "a",
        "nowhere",
        link,
        launched=words.rng.random() < 0.2,
        wait_seconds=7200.0,
        clock=lambda: link.now,
        start_worker=start,
    )
    code = supervisor.run(link.orphaned)
    assert code in (0, 1)
    assert all(line.isprintable() for line in supervisor.reason.split("\n"))
    assert all(worker.exit is not None for worker in workers), "a worker outlives its supervisor"
    return link.sent
