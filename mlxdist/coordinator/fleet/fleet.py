"""The fleet as the training loop sees it: ask for a gradient or scores, get the sum. Behind it: the cluster.

One poller thread carries the messages. The caller's thread adds partials up and saves, so that neither a large sum nor
a slow disk delays a message. Without a thread (`threaded=False`) the caller carries them itself, for tests.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from mlxdist.coordinator.cluster.audit import Answer, Audit, TaintedError, answer_of, with_rows
from mlxdist.coordinator.cluster.cluster import Cluster
from mlxdist.coordinator.cluster.events import NodeNews
from mlxdist.coordinator.cluster.timeline import NodeWork
from mlxdist.coordinator.fleet.ended import Ended, Printed
from mlxdist.coordinator.fleet.model_reader import ModelReader
from mlxdist.coordinator.fleet.model_source import ModelSource
from mlxdist.coordinator.fleet.sleep_detector import Absence
from mlxdist.coordinator.schedule.rounds import Request, Round, RowOutputs
from mlxdist.protocol.errors import NodeError
from mlxdist.protocol.messages import Loaded
from mlxdist.protocol.numerics import Promise
from mlxdist.protocol.transport import Hub
from mlxdist.protocol.tree import Span, TreeSum
from mlxdist.protocol.vectors import Vector

T = TypeVar("T")

POLL_SECONDS = 0.25
GOODBYE_SECONDS = 2.0


class Fleet:
    """All nodes of a run."""

    def __init__(
        self,
        cluster: Cluster,
        hub: Hub,
        *,
        on_news: Callable[[NodeNews], None] = lambda news: None,
        watch: Callable[[], Iterable[Ended | Printed]] = tuple,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        audit: Audit | None = None,
        model: ModelSource | None = None,
        threaded: bool = True,
    ) -> None:
        """`on_news` is called in the caller's thread while it waits; `watch` gives the supervisors' lines and ends.

        `model`: the files of the run's model, for nodes that have no copy.
        """
        self._cluster, self._hub, self._clock = cluster, hub, clock
        self._on_news, self._watch, self._audit = on_news, watch, audit or Audit()
        # A lock and a queue that are not written in Python: a Ctrl-C may be raised within the locks of those that are,
        # which are then held for ever.
        self._lock = threading.RLock()
        self._changed: queue.SimpleQueue[None] = queue.SimpleQueue()  # has something when messages came
        self._closing = False
        self._absence = Absence(clock, wall)
        self._pool = cluster.transfers.pool
        cluster.model.shared = model is not None
        self._reader = ModelReader(model, hub.wake, threaded=threaded) if model is not None else None
        self._thread = threading.Thread(target=self._carry, name="poller", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    # ---- what the loop asks

    def wait_for_model(self) -> Loaded:
        """The first worker's description of the loaded model. Raises what the nodes fail with."""
        return self._wait(lambda: self._cluster.introduction)

    def wait_for_nodes(self, expected: int, min_nodes: int, timeout: float) -> int:
        """Waits for all `expected` nodes, or after `timeout` seconds for `min_nodes`; returns how many are ready.

        While too few are ready it waits on for one that gets the model, as long as that goes on.

        Raises NodeError when there are fewer by then.
        """
        started = self._clock()

        def enough() -> int | None:
            ready = len(self._cluster.ready())
            if ready >= max(expected - len(self._cluster.members.given_up), min_nodes):
                return ready
            if self._clock() - started <= timeout or (ready < min_nodes and self._cluster.fetching(timeout)):
                return None
            if ready < min_nodes:
                raise NodeError(
                    f"{ready} of {expected} nodes are ready after {timeout:.0f} s, and {min_nodes} are needed: look at "
                    "the logs of the others, lower coordinator.min_nodes, or raise timing.start_timeout"
                )
            return ready

        return self._wait(enough)

    def send_adapter(self, version: int, vector: Vector) -> None:
        """Starts a new adapter version on its way to all nodes. `vector` must not change afterwards."""
        with self._lock:
            self._at_this_time().set_adapter(version, vector)
        self._hub.wake()

    def send_reference(self, vector: Vector) -> None:
        """The reference's adapter, for every node once, before its first work. `vector` must not change afterwards."""
        with self._lock:
            self._at_this_time().set_reference(vector)
        self._hub.wake()

    def gradient(self, request: Request) -> tuple[Vector, Sequence[RowOutputs]]:
        """The grad_sum over all leaves, and each leaf's row outputs. The vector is valid until the next call.

        Raises TaintedError when an audit has found a node whose numbers were wrong: ask for the whole step again.
        """
        with self._lock:
            request = self._audit.plan(request, len(self._cluster.ready()))
        self._pool.end_loan()
        current = self._begin(request)
        total = TreeSum(len(request.leaves), self._pool.add)
        answers: dict[int, list[Answer]] = {}
        for span, vector in self._partials(current):
            if span.start in request.apart:
                answers[span.start] = [answer_of(current.senders[span], vector)]
            total.put(span, vector)
        gradient, outputs = self._pool.lend(total.result), current.outputs_in_row_order()
        if answers:
            self._look_twice(request, {leaf: with_rows(current, leaf, one) for leaf, one in answers.items()})
        return gradient, outputs

    def _look_twice(self, request: Request, answers: dict[int, list[Answer]]) -> None:
        """Has the audited leaves computed on other nodes until it is known which is right, and acts on it."""
        while True:
            with self._lock:
                canaries = {node.name: node.canary for node in self._cluster.ready()}
                spare = set(self._cluster.scheduler.spare)
            question, findings = self._audit.questions(request, answers, canaries, spare)
            if question is None:
                break
            current = self._begin(question)
            for span, vector in self._partials(current):
                answers[span.start] += with_rows(current, span.start, [answer_of(current.senders[span], vector)])
                self._pool.give_back(vector)
        wrong, unlike = self._audit.conclude(request, answers, findings)
        with self._lock:
            cluster = self._at_this_time()
            for name, what in unlike.items():
                cluster.end_promise(name, what, request.step)
            for name, reason in wrong.items():
                cluster.quarantine(name, reason)
            if wrong:
                cluster.scheduler.forget_step()
                raise TaintedError("a node that took part in the step was quarantined")

    def score(self, request: Request) -> Sequence[RowOutputs]:
        """Each leaf's row outputs."""
        self._pool.end_loan()
        current = self._begin(request)
        self._wait(lambda: True if current.complete else None)
        return current.outputs_in_row_order()

    def begin_promise(self, from_step: int, earlier: Promise | None = None) -> Promise:
        """The promise about the bits from this step on, once the nodes are ready; `earlier`: of the sessions before."""
        with self._lock:
            return self._at_this_time().begin_promise(from_step, earlier)

    def packing(self) -> str:
        """The mode in which all nodes pack rows; it does not change after the promise."""
        with self._lock:
            return self._cluster.packing

    def leaves_recomputed(self) -> int:
        """Leaves that were computed, or begun, more than once so far: after a loss, or as copies of late ones."""
        with self._lock:
            current = self._cluster.round
            return self._cluster.scheduler.leaves_recomputed + (current.recomputed if current is not None else 0)

    @property
    def audited(self) -> int:
        """Leaves that were computed on a second node too, and compared."""
        return self._audit.audited

    def peak_gb(self) -> float:
        """The highest memory peak of any node so far, in GB (10^9 bytes)."""
        with self._lock:
            return max((node.peak_bytes for node in self._cluster.nodes.values()), default=0) / 1e9

    def node_speeds(self) -> dict[str, float]:
        """Measured tokens per second of every node that has worked."""
        with self._lock:
            speeds = {node.name: node.speed.tokens_per_second for node in self._cluster.ready()}
        return {name: speed for name, speed in speeds.items() if speed}

    def node_work(self, since: float) -> dict[str, NodeWork]:
        """Returns the work of each node that is here, or has worked, in the step that began at `since`.

        Tells the news first that came meanwhile: a loss belongs to the step whose work shows it.
        """
        with self._lock:
            news = self._take_news()
            rows = self._cluster.timeline.take(since)
            nodes = sorted(self._cluster.nodes.items())
            work = {
                name: NodeWork(
                    round(node.speed.tokens_per_second, 1),
                    node.peak_bytes / 1e9,
                    node.state.value,
                    rows.get(name, []),
                    swap_gb=round(node.swap_bytes / 1e9, 2) if node.swap_bytes >= 0 else None,
                    heat=node.heat,
                )
                for name, node in nodes
                if name in rows or not node.gone
            }
        for item in news:
            self._on_news(item)
        return work

    def hosts_and_canaries(self) -> dict[str, tuple[Mapping[str, str], tuple[str, ...]]]:
        """Returns the facts on its host and the digests of the canary, by name, of each node that has answered it."""
        with self._lock:
            return {name: (node.host, node.canary) for name, node in self._cluster.nodes.items() if node.canary}

    def present(self) -> set[str]:
        """Returns the names of the nodes that take part now, ready or on their way to it."""
        with self._lock:
            return {name for name, node in self._cluster.nodes.items() if not node.gone}

    def close(self, reason: str) -> None:
        """Says goodbye to all nodes, waits a moment for their answers, and closes the ports."""
        with self._lock:
            self._cluster.goodbye(reason)
        self._hub.wake()
        deadline = self._clock() + GOODBYE_SECONDS
        while not self._all_left() and self._clock() < deadline:
            if self._thread is None:
                self._pump(0.0)
                break
            self._sleep(0.05)
        self._closing = True
        self._hub.wake()
        if self._thread is not None:
            self._thread.join()
        if self._reader is not None:
            self._reader.close()
        self._hub.close()

    # ---- helpers

    def _at_this_time(self) -> Cluster:
        """The cluster, of which the caller holds the lock, knowing what time it is."""
        self._cluster.now = self._clock()
        return self._cluster

    def _sleep(self, seconds: float) -> None:
        """Waits until messages came, at most so long. The lock must be free."""
        with suppress(queue.Empty):
            self._changed.get(timeout=seconds)

    def _begin(self, request: Request) -> Round:
        with self._lock:
            current = self._at_this_time().begin(request)
        self._hub.wake()
        return current

    def _partials(self, current: Round) -> Iterator[tuple[Span, Vector]]:
        """The partials of a round as they come, until it is complete."""
        while found := self._wait(lambda: self._cluster.fetch_partials() or ([] if current.complete else None)):
            yield from found
            self._hub.wake()  # buffers were given back: partials that wait may travel

    def _wait(self, look: Callable[[], T | None]) -> T:
        """Waits until `look`, called under the lock, finds something. Raises the cluster's failure."""
        while True:
            with self._lock:
                for event in self._watch():
                    self._note(event)
                failure, found = self._cluster.failure, None
                if failure is None:
                    found = look()
                news = self._take_news()
            for item in news:
                self._on_news(item)
            if failure is not None:
                raise failure
            if found is not None:
                return found
            if self._thread is None:
                self._pump(0.0)
            else:
                self._sleep(POLL_SECONDS)

    def _take_news(self) -> list[NodeNews]:
        return [self._cluster.news.popleft() for _ in range(len(self._cluster.news))]

    def _note(self, event: Ended | Printed) -> None:
        match event:
            case Ended(name=name, error=error, final=final):
                self._cluster.supervisor_ended(name, error, final)
            case Printed(name=name, line=line):
                self._cluster.news.append(NodeNews(name, "", line, log=True))

    def _all_left(self) -> bool:
        return all(node.gone for node in self._cluster.nodes.values())

    def _carry(self) -> None:
        try:
            while not self._closing:
                self._pump(POLL_SECONDS)
        except Exception as error:  # told to the waiting thread, which raises it
            with self._lock:
                failure = NodeError(f"the coordinator's message thread failed: {error!r}")
                failure.__cause__ = error
                self._cluster.failure = failure
            self._wake()

    def _wake(self) -> None:
        if self._changed.empty():  # one is enough, and no more are kept
            self._changed.put(None)

    def _pump(self, timeout: float) -> None:
        parcels = self._hub.receive(timeout)
        with self._lock:
            gap, asleep = self._absence.since_last_look(timeout + self._cluster.settings.timing.beat_seconds)
            now = self._clock()
            if gap or asleep:
                self._cluster.slept(gap, asleep, now)
            for refusal in self._hub.take_refusals():
                self._cluster.turned_away(refusal, now)
            for parcel in parcels:
                self._cluster.receive(parcel, now)
                if parcel.waiting >= 0 and self._cluster.members.by_peer(parcel.channel, parcel.peer) is not None:
                    self._hub.admitted(parcel.waiting)
            if self._reader is not None:
                for answer in self._reader.answers():
                    self._cluster.model_answered(answer)
            self._cluster.tick(now)
            if self._reader is not None:
                self._reader.ask(self._cluster.take_readings())
            outgoing = self._cluster.take_outgoing()
        if parcels:
            self._wake()
        unsent = [parcel for parcel in outgoing if not self._hub.send(parcel)]
        if unsent:
            with self._lock:
                for parcel in unsent:
                    self._cluster.unreachable(parcel, self._clock())
