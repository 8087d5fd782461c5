"""A coordinator and its nodes in one thread: every message, leaf and second is a move, and the laws are looked at.

The laws: every leaf is in exactly one place (summed, assigned, or pending); what is summed has the values of
this step and this adapter; what is stale by its header changes nothing; no more vectors are held than section 8 of the
design allows, and none is forgotten; no node is accused of nonsense without cause.
"""

import random
import shutil
import tempfile
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import msgspec
import numpy as np

from mlxdist.coordinator.cluster.membership import MOST_RESTARTS
from mlxdist.coordinator.config.schema import TimingConfig
from mlxdist.coordinator.fleet.model_source import ModelSource
from mlxdist.coordinator.schedule.rounds import Request
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import MlxdistError, NodeError, NonFiniteError
from mlxdist.protocol.model_files import WINDOW
from mlxdist.protocol.numerics import SAME_BITS, Promise
from mlxdist.protocol.states import NodeState
from mlxdist.protocol.transport import CONTROL, DATA, PROBE, is_probe
from mlxdist.protocol.tree import Span, TreeSum
from mlxdist.protocol.vectors import Vector
from mlxdist.protocol.wire import Frames, decode
from tests.coordinator.cluster.scripted_node import CANARY, SPEC, leaf_of, new_cluster, state_of
from tests.memory_cluster import Move, SummingCluster, split_at
from tests.memory_nodes import Wire
from tests.simulation.sim_nodes import ELEMENTS, SimSupervisor, SimWorker, Surroundings, gradient_of, numbers_of

TICK = 1.0  # seconds; shorter than a beat
LATELY = 200  # messages that may be said again
TIME_SHARE = 0.04  # of the moves of a flow: a second epoches
CALM_SECONDS = 900.0  # within which a round ends when nothing is wrong any more: every deadline and wait, several times
REFERENCE = 7.0
CRASHES, NONFINITE = 3, 2
MODEL = {"config.json": 3, "empty.txt": 0, **{f"model-{place}.safetensors": 20 + place for place in range(6)}}  # bytes


class World(SummingCluster, Surroundings):
    """`min_nodes`, `launched` and `reference` as in a run; `scored`: a step has a round of scores first."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        min_nodes: int = 1,
        launched: bool = False,
        reference: bool = False,
        scored: bool = False,
        cuts: Sequence[int] = (),
    ) -> None:
        super().__init__(now=1000.0)
        self.supervisors: list[SimSupervisor] = []
        self.cuts, self.min_nodes, self.scored = tuple(cuts), min_nodes, scored
        self.reference = REFERENCE if reference else 0.0
        self.launched = frozenset(names) if launched else frozenset[str]()
        self.curses: dict[int, str] = {}  # leaf -> what it does to every worker in this step
        self.nans: dict[int, set[int]] = defaultdict(set)  # of this step, by leaf: the workers that said so
        self.disturbances = 0
        self.offers: dict[tuple[m.SessionId, int], m.VectorOffer] = {}
        self.disturbed: set[str] = set()  # names of nodes whose wires lost or damaged something
        self.liars: set[str] = set()  # names of nodes that gave a wrong answer
        self.promise = Promise(SAME_BITS, "the first nodes agree", 1, CANARY[0])
        self.alike = 0  # nodes of the class that could work at the last look
        self.news: list[str] = []
        self.said: list[tuple[str, bytes, m.Message, Frames]] = []
        self.step, self.leaves, self.incarnation, self._pids = 0, 0, 0, 0
        self.disks = Path(tempfile.mkdtemp(prefix="mlxdist-"))
        weakref.finalize(self, shutil.rmtree, self.disks, ignore_errors=True)
        (self.disks / "model").mkdir()
        for name, size in MODEL.items():
            (self.disks / "model" / name).write_bytes(bytes(range(size)))
        self.lent: Vector | None = None
        self.in_step = False
        self._begin_incarnation()
        for name in names:
            self.start(name)

    # ---- the coordinator

    def _begin_incarnation(self) -> None:
        self.incarnation += 1
        timing = TimingConfig(restart_seconds=0.5, progress_seconds=10.0, start_timeout=40.0)
        spec = msgspec.structs.replace(SPEC, model=str(self.disks / "of no node"))
        changes = {"spec": spec, "timing": timing, "min_nodes": self.min_nodes, "launched": self.launched}
        source = ModelSource(self.disks / "model", self.disks / "hashes.json")
        self.coordinate(new_cluster(incarnation=self.incarnation, **changes), model=source)
        self.cluster.scheduler.assigner = lambda seconds: split_at(self.cuts, seconds)
        self.cluster.bits.promise = self.promise  # as the folder of the run says
        # The same numbers in every incarnation, so that a session of an earlier one can be taken for one of this.
        self.cluster.members.draw = map(str, count(1)).__next__
        self.total, self.fetched, self.freed, self.lent = None, [], [], None
        if self.reference:
            self.cluster.set_reference(np.full(ELEMENTS, np.float32(self.reference)))

    def restart_coordinator(self) -> None:
        """It was killed, and resumes the step; all connections break."""
        for wire in self.wires.values():
            wire.lose_all()
            wire.closed = True
        self.restore_connections()
        self._begin_incarnation()
        if self.in_step:
            self._request("score" if self.scored else "gradient")
        self.pump()

    def begin_step(self, leaves: int) -> None:
        """The next step's first request."""
        self.step, self.leaves, self.in_step = self.step + 1, leaves, True
        self.curses, self.nans = {}, defaultdict(set)
        if self.lent is not None:
            self.cluster.transfers.pool.give_back(self.lent)
            self.lent = None
        self._request("score" if self.scored else "gradient")

    @property
    def adapter(self) -> float:
        return float(self.step + 20)

    def _request(self, verb: str) -> None:
        self.cluster.now = self.now  # as the fleet says before each call: a wait does not begin at 0
        self.cluster.set_adapter(self.step, np.full(ELEMENTS, np.float32(self.adapter)))
        leaves = tuple(leaf_of(index) for index in range(self.leaves))
        self.total = TreeSum(self.leaves, self.add) if verb == "gradient" else None
        self.nodes_at_begin = len(self.cluster.ready())
        self.cluster.begin(Request(verb, self.step, self.step, leaves))
        self.pump()

    def loop(self) -> Callable[[], None] | None:
        """The next move of the training loop, if any."""
        current = self.cluster.round
        if not self.in_step or current is None or self.cluster.failure is not None:
            return None
        if (move := super().loop()) is not None:
            return move
        return self._end_round if current.complete and (self.total is None or self.total.done) else None

    def sum_one(self) -> None:
        """Adds the next partial, if it has the right values."""
        span, vector = self.fetched[0]
        wanted = gradient_of(span, self.step, self.adapter, self.reference)
        assert vector.tolist() == wanted.tolist(), f"the partial over {span} has other values"
        super().sum_one()

    def _end_round(self) -> None:
        current = self.cluster.round
        assert current is not None
        for leaf, numbers in enumerate(current.outputs_in_row_order()):
            wanted = numbers_of(leaf, self.step, self.adapter, self.reference)
            found = numbers.tolist()
            if (
                self.total is None and np.isnan(numbers).any()
            ):  # of a score it is a result, as a validation loss may be infinite
                assert len(self.nans[leaf]) >= NONFINITE, f"NaN in leaf {leaf}, but no two workers found it"
                continue
            assert found == [wanted.tolist()], f"the row outputs of leaf {leaf} are {found}, not {wanted.tolist()}"
        if self.total is None:
            self._request("gradient")
            return
        whole = gradient_of(Span(0, self.leaves), self.step, self.adapter, self.reference)
        assert self.total.result.tolist() == whole.tolist(), "the sum is another"
        self.lent, self.total, self.in_step = self.total.result, None, False

    # ---- what nodes need

    def new_pid(self) -> int:
        """A new pid."""
        self._pids += 1
        return self._pids

    def fate(self, worker: SimWorker, leaf: int) -> str:
        """The fate of a worker at a leaf."""
        fate = self.curses.get(leaf, "")
        if worker.doomed:
            fate = "crash"
        elif worker.bad:
            worker.bad, fate = False, "nan"
        if fate == "nan":
            self.nans[leaf].add(worker.pid)
        return fate

    def lied(self, worker: SimWorker, span: Span | None) -> None:
        """Notes a wrong answer."""
        self.liars.add(worker.name)
        for leaf in range(span.start, span.stop) if span is not None else ():
            self.nans[leaf].add(worker.pid)

    def models_of(self, node: str) -> Path:
        """The folder for models on a node's disk."""
        return self.disks / "nodes" / node

    def close(self) -> None:
        """Lets go of the files of nodes that get the model."""
        for worker in self.workers():
            if worker.locator is not None:
                worker.locator.close()

    # ---- the nodes

    def start(self, name: str) -> SimSupervisor:
        """A supervisor is started."""
        self.supervisors.append(SimSupervisor(self, name, launched=name in self.launched))
        return self.supervisors[-1]

    def workers(self) -> list[SimWorker]:
        """All that live."""
        found = [one.worker for one in self.supervisors if one.worker is not None]
        return [worker for worker in found if worker.exit is None]

    def wires_of(self, supervisor: SimSupervisor) -> list[Wire]:
        """The open connections of a node."""
        worker = supervisor.worker
        wires = [supervisor.wire, *([worker.wire] if worker is not None and worker.wire is not None else [])]
        return [wire for wire in wires if not wire.ended]

    def _remove_ended(self) -> None:
        """Supervisors that have ended: who launched them is told."""
        for one in [one for one in self.supervisors if one.exit_code is not None]:
            self.supervisors.remove(one)
            if one.launched:
                error = NodeError(f"{one.name}: its supervisor ended")
                self.cluster.supervisor_ended(one.name, error, one.reason != "killed")

    # ---- what goes wrong on the way

    def break_wire(self, wire: Wire, *, back: bool) -> None:
        """A connection breaks with all that is under way on it; `back`: it is there again at once."""
        wire.lose_all()
        wire.closed = True
        if back:
            self._reconnect(wire)
        for one in self.supervisors:
            if wire in self.wires_of(one):
                self._disturb(one)

    def _disturb(self, node: SimSupervisor) -> None:
        self.disturbed.add(node.name)
        if node.worker is not None:
            node.worker.disturbed = True

    def restore_connections(self) -> None:
        """All connections are there again."""
        for wire in self.wires.values():
            wire.cut_up = wire.cut_down = False
            if wire.closed:
                self._reconnect(wire)

    def _reconnect(self, wire: Wire) -> None:
        """A worker's new connection begins with a probe."""
        wire.closed = False
        if wire.channel == DATA and not wire.ended:
            wire.up.append(list(PROBE))
        for worker in self.workers():
            if worker.wire is wire:
                worker.flush()

    def kill_worker(self, worker: SimWorker, which: int) -> None:
        """It ends, and the last of what it had sent with it."""
        worker.end("killed (SIGKILL)")
        if worker.wire is not None:
            self._shorten(worker.wire, which)

    def kill_supervisor(self, node: SimSupervisor, which: int) -> None:
        """It ends, and the last of what it and its worker had sent with it."""
        for wire in self.wires_of(node):
            self._shorten(wire, which)
        node.end("killed")
        self._remove_ended()

    def _shorten(self, wire: Wire, which: int) -> None:
        for _ in range(which % (len(wire.up) + 1)):
            wire.up.pop()

    def sleep(self, seconds: float) -> None:
        """The coordinator does nothing for so long, while the nodes go on."""
        self.now += seconds
        for one in list(self.supervisors):
            if not one.stopped:
                one.turn()
        self.pump()
        self._remove_ended()

    def say_again(self, which: int, *, stranger: bool) -> None:
        """Something that was said lately arrives again: from a stranger's connection, or because its time is over."""
        lately = self.said[-LATELY:]
        if stranger:
            found = [(DATA, b"stranger", message, frames) for channel, _, message, frames in lately if channel == DATA]
            found = [one for one in found if not isinstance(one[2], m.Hello)]
        else:
            found = [one for one in lately if self._stale(*one[:3])]
        if found:
            channel, peer, _, frames = found[which % len(found)]
            self.post(channel, peer, frames)

    # ---- moves

    def moves(self, rnd: random.Random) -> list[Move]:
        """All that could happen next, but for time passing."""
        found: list[Move] = []
        for wire in self.wires.values():
            if wire.up and not wire.cut_up:
                found.append(("up", lambda wire=wire: self.deliver_up(wire)))  # type: ignore[misc]
            if wire.down and not wire.cut_down and not wire.ended and self._listens(wire):
                found.append(("down", lambda wire=wire: self.deliver_down(wire)))  # type: ignore[misc]
        for one in self.supervisors:
            if one.wire.inbox and not one.stopped:
                found.append(("turn", one.turn))
            worker = one.worker
            if worker is not None and worker.can_work and not (worker.slow and rnd.random() < 0.9):
                found.append(("work", worker.step))
        if (loop := self.loop()) is not None:
            found.append(("loop", loop))
        return found

    def _listens(self, wire: Wire) -> bool:
        return not any(worker.stopped for worker in self.workers() if worker.wire is wire)

    def flow(self, moves: int, seed: int) -> None:
        """Many things happen, in an order of their own."""
        rnd = random.Random(seed)
        for _ in range(moves):
            if self.over:
                return
            found = self.moves(rnd)
            if not found or rnd.random() < TIME_SHARE:
                self.time(TICK)
                continue
            rnd.choice(found)[1]()
            self.look()

    def time(self, seconds: float) -> None:
        """Time passes; who is awake beats, messages travel, and a worker computes a leaf a second."""
        end, rnd = self.now + seconds, random.Random(self.now)
        while self.now < end and not self.over:
            self.now = min(self.now + TICK, end)
            for one in list(self.supervisors):
                if not one.stopped:
                    one.turn()
            for wire in list(self.wires.values()):
                while wire.up and not wire.cut_up and not self.over:
                    self.deliver_up(wire)
            self.pump()
            for wire in list(self.wires.values()):
                while wire.down and not wire.cut_down and not wire.ended and self._listens(wire):
                    self.deliver_down(wire)
            for kind, move in self.moves(rnd):
                if kind in ("work", "loop"):
                    move()
            self._remove_ended()
            self.look()

    def deliver_up(self, wire: Wire) -> None:
        """One message reaches the coordinator."""
        super().deliver_up(wire)
        if wire.ended and not wire.up:
            del self.wires[wire.channel, wire.peer]

    def post(self, channel: str, peer: bytes, frames: Frames) -> None:
        """Delivers a message from any peer. One that is stale by its header must change nothing."""
        for _ in range(2):  # a connection is found closed, then suspect: what time brings is not the message's doing
            self.pump()
        if is_probe(frames):
            super().post(channel, peer, frames)
            self.pump()
            return
        message, _ = decode(frames)
        self.said.append((channel, peer, message, frames))
        if isinstance(message, m.VectorOffer):
            self.offers[message.session, message.stream] = message
        stale = self._stale(channel, peer, message)
        before = state_of(self.cluster) if stale else None
        super().post(channel, peer, frames)
        self.pump()
        if stale:
            assert state_of(self.cluster) == before, f"a stale {type(message).__name__} changed something: {message}"

    def _stale(self, channel: str, peer: bytes, message: m.Message) -> bool:
        """True if the message is stale by its header and the nodes that are there."""
        session = getattr(message, "session", None)
        if session is None:
            return False
        node = next((one for one in self.cluster.nodes.values() if one.session == session and not one.gone), None)
        if node is None:
            return True
        if channel == CONTROL:
            return False
        if node.worker.ended or (peer != node.worker.data and not isinstance(message, m.Hello)):
            return True
        if isinstance(message, m.VectorBlock | m.VectorEnd):
            message = self.offers.get((session, message.stream), message)
        match message:
            case (
                m.LeafAnswer(step=step, attempt=attempt, adapter_version=version)
                | m.VectorOffer(step=step, attempt=attempt, adapter_version=version)
            ):
                return (step, version) != (self.step, self.step) or not self._is_current(attempt, node.name)
            case m.Fault(kind="nonfinite", step=step, attempt=attempt):
                return step != self.step or not self._is_current(attempt, node.name)
        return False

    def _is_current(self, attempt: int, name: str) -> bool:
        current = self.cluster.round
        return current is not None and attempt in current.assignments and current.assignments[attempt].node == name

    # ---- the laws

    @property
    def over(self) -> bool:
        """True if the run has failed."""
        return self.cluster.failure is not None

    def look(self) -> None:
        """Every law that can be seen at any moment."""
        self._no_node_is_blamed_without_cause()
        if self.cluster.failure is not None:
            self._may_fail(self.cluster.failure)
        elif self.in_step:
            self._every_leaf_is_in_one_place()
        self._only_nodes_that_are_there_have_work()
        self._the_promise_is_kept_or_taken_back()
        self._memory_is_bounded()

    def _no_node_is_blamed_without_cause(self) -> None:
        news = self.cluster.news
        while news:
            item = news.popleft()
            self.news.append(f"{self.now:.1f} {item.name}: {item.message}")
            said = "makes no sense" in item.message and "in a row arrived damaged" not in item.message  # those did
            assert not said or item.name in self.disturbed | self.liars, self.news[-1]
            assert "which it did not say" not in item.message or item.name in self.liars, self.news[-1]
        for name, reason in self.cluster.members.quarantined.items():
            assert name in self.liars or self.disturbances > MOST_RESTARTS, (
                f"{name} was put out without cause: {reason}"
            )

    def _may_fail(self, failure: MlxdistError) -> None:
        if isinstance(failure, NonFiniteError):
            worst = max(map(len, self.nans.values()), default=0)
            assert worst >= NONFINITE, f"{failure}, but no two workers found NaN in a leaf"
        elif self.launched and self.launched <= self.cluster.members.given_up.keys():
            assert all(node.gone for node in self.cluster.nodes.values()), f"{failure}, but a node is there"
        else:
            assert "workers ended while they computed" in str(failure), failure
            cursed = list(self.curses.values()).count("crash")
            assert cursed or self.disturbances >= CRASHES, f"{failure}, but not so many died"

    def _every_leaf_is_in_one_place(self) -> None:
        current = self.cluster.round
        assert current is not None
        if self.total is None and current.request.verb == "gradient":
            return
        places: Counter[int] = Counter(leaf for run in current.pending for leaf in range(run.start, run.stop))
        hands = {leaf for span in current.missing for leaf in range(span.start, span.stop)}
        places.update(hands)
        if self.total is not None:
            for spans in (self.total.held, dict(self.fetched), dict(current.partials)):
                places.update(leaf for span in spans for leaf in range(span.start, span.stop))
        else:
            places.update(current.answers.keys() - places.keys())
        assert places == Counter(range(self.leaves)), f"leaves by the number of places where they are: {places}"

    def _only_nodes_that_are_there_have_work(self) -> None:
        current = self.cluster.round
        for attempt in current.assignments.values() if current is not None else ():
            node = self.cluster.nodes[attempt.node]
            can = node.state in (NodeState.READY, NodeState.BUSY, NodeState.SUSPECT)
            assert can, f"{node.name} is {node.state.value} and has {attempt}"
            assert not node.worker.ended, f"{node.name}'s worker has ended and has {attempt}"
            beside = [one for one in current.of(node.name) if one is not attempt] if current is not None else []
            at_work = attempt.alone and attempt.in_work is not None
            assert not at_work or all(one.in_work is None for one in beside), "not alone"

    def _the_promise_is_kept_or_taken_back(self) -> None:
        promise, current = self.cluster.bits.promise, self.cluster.round
        assert promise is not None
        alike = [one for one in self.cluster.nodes.values() if one.there and one.canary == CANARY]
        if promise != self.promise:  # since the last look; one of the class may have come since it was taken back
            most = min(len(alike), self.alike)
            assert most < self.min_nodes, f"{promise.sentence}, but {most} nodes of the class can work"
            assert promise.sentence in "\n".join(self.news), "a promise that nobody heard of"
            self.promise = promise
        self.alike = len(alike)
        if promise.kind == SAME_BITS:
            for attempt in current.assignments.values() if current is not None else ():
                canary = self.cluster.nodes[attempt.node].canary
                assert canary == CANARY, f"{attempt.node} computes in a run of the same bits with the canary {canary}"

    def _memory_is_bounded(self) -> None:
        uploads, current = self.cluster.transfers.uploads, self.cluster.round
        mine = len(self.fetched) + len(self.freed) + (self.lent is not None)
        mine += len(self.total.held) if self.total is not None else 0
        there = len(uploads._arriving) + (len(current.partials) if current is not None else 0)
        assert uploads.pool.held == mine + there, f"{uploads.pool.held} vectors count as held, {mine + there} are"
        for reader in self.cluster.model._readers.values():
            assert len(reader.waiting) + reader.under_way <= WINDOW, "more blocks than a window"
        if self.in_step:
            bound = self.nodes_at_begin + 2 + (self.leaves - 1).bit_length()
            assert uploads.pool.held <= bound, f"{uploads.pool.held} vectors are held, {bound} are allowed"

    # ---- when all is well again

    def calm(self) -> None:
        """Nothing is wrong any more, but for leaves that are cursed."""
        self.damage_up = self.damage_down = 0
        for one in self.supervisors:
            one.stopped = False
            if one.worker is not None:
                one.worker.stopped = one.worker.slow = one.worker.bad = one.worker.doomed = False
                one.worker.lie = ""
        self.restore_connections()

    def settle(self) -> None:
        """All is well again: the step ends, with a sum or with a failure that the rules allow."""
        self.calm()
        self._until(lambda: not self.in_step, "the step did not end")
        if self.over:
            return
        assert not self.in_step
        self._until(self._all_work, "not everybody works again")
        for path in (self.disks / "nodes").glob("*/*/[!.]*"):
            assert path.suffix == ".part" or path.read_bytes() == bytes(range(MODEL[path.name])), f"{path.name} differs"

    def _all_work(self) -> bool:
        names = {one.name for one in self.supervisors}
        spares = {name for name, node in self.cluster.nodes.items() if node.held_back and node.connected}
        return names <= spares | {node.name for node in self.cluster.ready()}

    def _until(self, done: Callable[[], bool], what: str) -> None:
        end = self.now + CALM_SECONDS
        rnd = random.Random(1)
        while not done() and not self.over:
            assert self.now < end, f"{what}:\n" + "\n".join(self.news[-30:])
            while len(self.supervisors) < max(self.min_nodes, 1):
                self.start(f"fresh-{self.new_pid()}")
            for _ in range(400):
                found = self.moves(rnd)
                if not found or self.over or done():
                    break
                rnd.choice(found)[1]()
                self.look()
            self.time(TICK)
