"""A cluster under attack: two honest nodes, an admitted one that lies, and strangers, all with hostile frames.

The laws of the world hold all the time, and three more: no error of ours is found by a message, no message ends the
run, and what is kept of peers is bounded. An admitted node is trusted with numbers of the right shape, so the liar
never sends row outputs that would count.
"""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from mlxdist.coordinator.cluster.cluster import MOST_NEWS
from mlxdist.coordinator.cluster.membership import MOST_NODES
from mlxdist.coordinator.cluster.offenders import MOST_PEERS
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import WireError
from mlxdist.protocol.transport import CONTROL, DATA, Parcel
from mlxdist.protocol.wire import Frames, decode
from tests.memory_cluster import MemoryCluster
from tests.protocol.example_messages import MESSAGE_TYPES
from tests.simulation.hostile_words import Words
from tests.simulation.sim_nodes import ELEMENTS, MOST_LEAVES, SimSupervisor
from tests.simulation.sim_world import World

HONEST, LIAR = ("a", "b"), "evil"
STRANGERS = 6  # connections on each port
NAMES = (*HONEST, LIAR, "c", "d", "e", "", "../x", "x" * 200)
KEPT = 400  # frames that may be said again
BURST = 5  # messages between two looks at the steps
PATIENCE = 30  # seconds for the liar to be ready
CONTROL_WORDS = (m.Register, m.Heartbeat, m.Heartbeat, m.Heartbeat, m.Log, m.Log, m.Leave)
DATA_WORDS = (
    *(m.VectorOffer, m.VectorBlock, m.VectorEnd) * 3,
    *(m.LeafAnswer, m.Cancel, m.Credit, m.Received, m.Pong, m.Progress, m.Fault) * 2,
    *(m.Hello, m.Loaded, m.CanaryAnswer, m.ModelWanted, m.BlockWanted, m.BlockWanted, m.BlockTaken, m.ModelHere),
)


class Besieged(World):
    """A world with a liar. `sent` counts hostile messages by their type."""

    def __init__(self, seed: int, *, scored: bool = False) -> None:
        super().__init__((*HONEST, LIAR), scored=scored)
        self.rng = random.Random(seed)
        self.sent: Counter[str] = Counter()
        self.steps = 0
        self.liars.add(LIAR)

    # ---- hostile frames

    def attack(self, count: int) -> None:
        """Sends so many hostile messages, from the liar and from strangers, while the others go on."""
        for _ in range(count):
            self.cluster.members.quarantined.pop(LIAR, None)  # put out long before it has said everything
            if not any(one.name == LIAR for one in self.supervisors):
                self.start(LIAR)
            for one in self.supervisors:
                if one.name == LIAR:
                    self._disturb(one)
            self.disturbed |= {*NAMES, LIAR} - {*HONEST}
            channel = self.rng.choice((CONTROL, DATA))
            if self.rng.random() < 0.6:
                self._say(channel, self._liar(channel), self._lies(channel))
            else:
                stranger = f"stranger {self.rng.randrange(STRANGERS)}".encode()
                self._say(channel, stranger, self._strange(channel))
            if self.rng.random() < 0.3:
                self.flow(self.rng.randrange(1, 20), self.rng.randrange(2**16))

    def _say(self, channel: str, peer: bytes, frames: Frames) -> None:
        try:
            message, payload = decode(frames)
        except WireError:
            self.sent["no message"] += 1
        else:
            if self._would_count(message, payload):
                return
            self.sent[type(message).__name__] += 1
            if peer.startswith(b"stranger"):
                self.post(channel, peer, frames)  # with the law that what is stale changes nothing
                return
        MemoryCluster.post(self, channel, peer, frames)  # the liar may be restarted for it
        self.pump()
        self.look()

    def _would_count(self, message: m.Message, payload: memoryview) -> bool:
        """True for what an admitted node is trusted with."""
        match message:
            case m.LeafAnswer(columns=columns):
                return payload.nbytes == 4 * columns
            case m.Fault(kind="nonfinite") | m.WorkerExit() | m.Heartbeat(worker_pid=0):
                return True
        return False

    def _liar(self, channel: str) -> bytes:
        liar = self._supervisor(LIAR)
        wire = liar.worker.wire if channel == DATA and liar.worker is not None else liar.wire
        return wire.peer if wire is not None else b"none"

    def _supervisor(self, name: str) -> SimSupervisor:
        return next(one for one in self.supervisors if one.name == name)

    def _lies(self, channel: str) -> Frames:
        """A message of the liar in its session."""
        node = self.cluster.nodes.get(LIAR)
        current = self.cluster.round
        mine = current.of(LIAR) if current is not None else []
        edges = [edge for one in mine for edge in (one.span.start, one.span.stop)] or [0, 1]
        pieces = [piece for one in mine for piece in one.missing]
        known: dict[str, Sequence[Any]] = {
            "session": [list(_fields(node.session))] if node is not None else [],
            "attempt": [one.attempt for one in mine],
            "step": [self.step],
            "adapter_version": [self.step],
            "leaf": [leaf for leaf in range(*edges[:2])],
            "start": [*edges, *(piece.start for piece in pieces)],
            "stop": [*edges, *(piece.stop for piece in pieces)],
            "elements": [ELEMENTS],
            "slice_start": [0],
            "slice_stop": [ELEMENTS],
            "stream": range(1, 6),
            "index": [0, 0, 1],
            "file": [0, 1, 2],
            "block": [0, 0, 1],
            "receipt": [receipt for one in self.cluster.model._readers.values() for receipt in one.unread],
            "kind": ["partial", "partial", "adapter", "error", "config"],
            "name": [LIAR, *NAMES],
            "protocol": [m.PROTOCOL_VERSION],
            "columns": [1, 4],
            "worker_pid": [node.worker.pid if node is not None else 0, 5],
        }
        peers = {wire.peer for wire in self.wires_of(self._supervisor(LIAR))}
        heard = [frames for _, peer, _, frames in self.said[-KEPT:] if peer not in peers]
        fitting = CONTROL_WORDS if channel == CONTROL else DATA_WORDS
        return Words(self.rng, known, heard).frames(fitting if self.rng.random() < 0.9 else MESSAGE_TYPES)

    def _strange(self, channel: str) -> Frames:
        """A message of a stranger, who may have heard everything but knows no session before its worker says hello."""
        heard = [
            frames for _, _, said, frames in self.said[-KEPT:] if channel == CONTROL or not isinstance(said, m.Hello)
        ]
        known = {"session": [["run", 1, "0" * 32], ["run", 2**62, "x"]], "name": NAMES, "protocol": [1, 1, 1, 2]}
        kinds = (*MESSAGE_TYPES, m.Register, m.Register) if channel == CONTROL else MESSAGE_TYPES
        return Words(self.rng, known, heard).frames(kinds)

    # ---- the laws

    def look(self) -> None:
        """Every law that can be seen at any moment."""
        for news in self.cluster.news:
            assert all(line.isprintable() for line in news.message.split("\n")), news
        super().look()
        offenders = self.cluster.offenders
        if offenders.first_error is not None:
            raise AssertionError("a message made an error here") from offenders.first_error
        assert not self.over, self.cluster.failure
        assert len(self.cluster.nodes) <= MOST_NODES
        assert len(self.cluster.news) <= MOST_NEWS
        assert max(len(offenders._said), len(offenders._answers), len(offenders._until)) <= MOST_PEERS

    def send(self, parcel: Parcel) -> bool:
        """Strangers are connected, and read nothing; the liar does not mind being rejected."""
        if parcel.peer.startswith(b"stranger"):
            return True
        lies = parcel.peer.startswith(LIAR.encode()) and isinstance(decode(parcel.frames)[0], m.Reject)
        return lies or super().send(parcel)

    def _all_work(self) -> bool:
        return set(HONEST) <= {node.name for node in self.cluster.ready()}

    def siege(self, messages: int) -> None:
        """Takes steps while so many hostile messages come; the sums are right, and the honest nodes work at the end."""
        for _ in range(messages // BURST):
            if not self.in_step:
                for _ in range(PATIENCE):  # so that the liar has a share of the next one, as a rule
                    if LIAR in {node.name for node in self.cluster.ready()}:
                        break
                    self.time(1.0)
                self.steps += 1
                self.begin_step(self.rng.randrange(1, MOST_LEAVES + 1))
            self.attack(BURST)
            del self.said[:-KEPT], self.news[:]
        self.settle()


def _fields(session: m.SessionId) -> tuple[str, int, str]:
    return session.run, session.incarnation, session.number
