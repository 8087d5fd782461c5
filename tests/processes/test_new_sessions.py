"""A worker gets a new session and keeps its model when its connection breaks, its node is given up, or its coordinator
is restarted. Nothing of the old session counts.
"""

import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from mlxdist.keys.pair import keys_line
from mlxdist.node import supervisor as supervisors
from mlxdist.node.process import KILL_SECONDS, Order, Worker
from mlxdist.node.supervisor import Supervisor
from mlxdist.protocol import messages as m
from mlxdist.protocol.launched import LaunchOrder, order_line
from mlxdist.protocol.transport import CONTROL, DATA, PROBE, Parcel
from mlxdist.protocol.tree import Span
from mlxdist.protocol.wire import encode
from scripts.local_cluster import free_ports
from tests.coordinator.cluster.scripted_node import PARTIAL, Bench, ScriptedNode, working
from tests.faults.fault_proxy import DOWN, UP, Proxy, Seen, wait_for
from tests.memory_nodes import Wire
from tests.processes.thread_nodes import HERE, Loads, config_of, request, start_coordinator, thread_nodes

# ---- what the coordinator does with a new connection


def probe(node: ScriptedNode) -> None:
    """Sends the probe that begins a new data connection."""
    node.bench.cluster.receive(Parcel(DATA, node.data, PROBE), node.bench.now)
    node.bench.collect()


def test_a_first_connection_is_no_news() -> None:
    bench = Bench()
    node = ScriptedNode(bench, "a")
    node.enlist()
    session = node.session
    probe(node)
    node.get_ready()
    assert (node.session, node.state) == (session, "ready")


def test_a_new_connection_of_a_worker_ends_its_session_and_its_work_is_reassigned() -> None:
    bench = Bench()
    a, b = working(bench, "a", "b")
    old, attempt = a.session, bench.cluster.round.of("a")[0]  # type: ignore[union-attr]
    a.say(*a.answer(0))
    probe(a)
    assert a.session != old
    assert a.state == "connecting"
    assert [(stale.session, stale.over) for stale in a.heard(m.Stale, CONTROL)] == [(old, True)]
    current = bench.cluster.round
    assert current is not None
    assert {leaf for one in current.of("b") for leaf in range(one.span.start, one.span.stop)} == {0, 1, 2, 3}
    assert not current.crashes[attempt.span.start], "the leaf is not to blame for the network"
    assert b.state == "busy"


def test_everything_that_the_old_session_still_sends_is_refused() -> None:
    bench = Bench()
    a, _ = working(bench, "a", "b")
    old, late = a.session, a.answer(0)
    a.say(a.offer(Span(0, 2), stream=4))
    probe(a)
    a.heard(m.Stale)
    before = bench.cluster.transfers.pool.held
    for message, payload in (late, (m.VectorBlock(old, 4, 0), PARTIAL.tobytes()), (m.Cancel(old, 1), b"")):
        a.say(message, payload)
        assert [(stale.session, stale.over) for stale in a.heard(m.Stale)] == [(old, True)]
    assert not bench.cluster.round.answers  # type: ignore[union-attr]
    assert bench.cluster.transfers.pool.held == before == 0


def test_the_supervisor_registers_again_and_the_worker_works_in_the_new_session() -> None:
    bench = Bench()
    a, b = working(bench, "a", "b")
    old = a.session
    probe(a)
    a.tell(m.Heartbeat(old, 2))  # it does not know yet
    assert a.heard(m.Stale, CONTROL)[-1].over
    a.enlist()
    (admit,) = a.heard(m.Accept, CONTROL)
    assert admit.session == a.session != old
    a.get_ready()
    assert a.state == "ready"
    assert bench.cluster.failure is None
    assert b.state == "busy"


def test_a_hello_that_is_repeated_before_the_welcome_counts_once() -> None:
    bench = Bench()
    node = ScriptedNode(bench, "a")
    node.enlist()
    node.hello()
    node.hello()
    assert len(node.heard(m.Welcome)) == 1
    assert node.state == "loading"


def test_a_worker_that_stays_without_a_connection_gets_a_new_session_and_is_not_killed() -> None:
    bench = Bench()
    a, _ = working(bench, "a", "b")
    a.beat()
    old = a.session
    bench.cluster.unreachable(Parcel(DATA, a.data, []), bench.now)
    a.heard(m.Restart, CONTROL)
    bench.tick(bench.cluster.settings.timing.return_seconds)
    a.beat()  # without heartbeats the node would be lost, not its connection
    bench.tick(0.3)
    bench.collect()
    mail = [message for message, _ in bench.mail[CONTROL, a.control]]
    assert any(isinstance(one, m.Stale) and one.over and one.session == old for one in mail)
    assert not any(isinstance(one, m.Restart) for one in mail)


def test_a_worker_that_never_says_hello_is_restarted() -> None:
    bench = Bench()
    node = ScriptedNode(bench, "a")
    node.enlist()
    for _ in range(int(bench.cluster.settings.timing.start_timeout / 2) + 2):
        node.beat()
        bench.tick(2.0)
        bench.collect()
    assert node.heard(m.Restart, CONTROL)


# ---- the supervisor


class Idle(Worker):
    """A worker that remembers its orders."""

    def __init__(self) -> None:
        super().__init__(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True))
        self.sessions: list[m.SessionId] = []

    def order(self, order: Order) -> None:
        self.sessions.append(order.session)


@pytest.fixture
def idle() -> Iterator[Idle]:
    worker = Idle()
    yield worker
    worker.stop()


def admit(session: m.SessionId) -> m.Accept:
    return m.Accept(session, 7001, 2.0, {}, 1.0)


def test_a_supervisor_whose_session_is_over_gives_the_next_one_to_the_same_worker(idle: Idle) -> None:
    link, now = Wire(CONTROL, b"a"), [0.0]
    started: list[Mapping[str, str]] = []

    def start(environment: Mapping[str, str]) -> Worker:
        started.append(environment)
        return idle

    supervisor = Supervisor(
        "a",
        HERE,
        link,
        launched=False,
        wait_seconds=60,
        clock=lambda: now[0],
        start_worker=start,
    )
    first, second = m.SessionId("run", 1, "1"), m.SessionId("run", 2, "1")
    supervisor._handle(admit(first))
    supervisor._handle(m.Stale(m.SessionId("run", 1, "9"), "another's", over=True))
    assert supervisor.session == first, "only its own session"
    supervisor._handle(m.Stale(first, "a beat", over=True))
    assert supervisor.session is None
    now[0] += 1.0
    supervisor._tick()
    assert list(link.up) == [encode(m.Register(m.PROTOCOL_VERSION, "a", idle.process.pid, supervisors.host_facts()))]
    supervisor._handle(admit(second))
    supervisor._handle(admit(second))
    assert idle.sessions == [first, second]
    assert len(started) == 1


def test_a_supervisor_whose_worker_pauses_does_not_register_before_the_pause_is_over(idle: Idle) -> None:
    link, now = Wire(CONTROL, b"a"), [0.0]
    supervisor = Supervisor(
        "a", HERE, link, launched=False, wait_seconds=60, clock=lambda: now[0], start_worker=lambda _: idle
    )
    session = m.SessionId("run", 1, "1")
    supervisor._handle(admit(session))
    idle.process.kill()
    idle.process.wait()
    supervisor._tick()
    assert supervisor.worker is None
    supervisor._handle(m.Stale(session, "a beat", over=True))
    now[0] += 0.9  # of the pause of one second
    supervisor._tick()
    supervisor._handle(admit(m.SessionId("run", 1, "2")))  # late, the answer to an earlier registration
    assert supervisor.worker is None
    now[0] += 0.2
    supervisor._tick()
    assert supervisor.session is None
    supervisor._tick()
    assert "Register" in str(link.up[-1])


HANGS = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"


def test_a_node_whose_launcher_is_gone_leaves_even_with_a_worker_that_ignores_signals() -> None:
    worker = Worker.start({}, ("-c", HANGS))
    worker.kill_seconds = 0.4
    while not worker.tail:  # until it ignores signals
        assert worker.process.poll() is None
    supervisor = Supervisor(
        "a", HERE, Wire(CONTROL, b"a"), launched=True, wait_seconds=60, start_worker=lambda _: worker
    )
    supervisor._handle(admit(m.SessionId("run", 1, "1")))
    orphaned = threading.Event()
    orphaned.set()
    assert supervisor.run(orphaned) == 0
    assert worker.process.poll() == -9


def test_a_leaving_node_waits_less_than_ten_seconds_in_all() -> None:
    assert KILL_SECONDS + 0.5 + 1.0 < 10.0  # the worker, one poll of the link, and the end of both


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_launched_node_with_a_stopped_worker_leaves_within_ten_seconds_of_its_launchers_end(model: Path) -> None:
    port = free_ports()
    coordinator = start_coordinator(config_of(model), port)
    command = [sys.executable, "-m", "mlxdist", "node", "--launched", "--name", "a"]
    node = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert node.stdin is not None
    node.stdin.write(keys_line(None) + order_line(LaunchOrder(HERE, port)))
    node.stdin.flush()
    try:
        coordinator.fleet.wait_for_nodes(1, 1, 60.0)
        (worker,) = psutil.Process(node.pid).children()
        worker.suspend()
        node.stdin.close()
        assert node.wait(10.0) == 0
        assert not worker.is_running()
    finally:
        node.kill()
        node.wait()
        coordinator.fleet.close("the test is over")


# ---- over loopback, with real sessions, engines and sockets


def loads(*engines: object) -> list[tuple[int, int]]:
    """(loaded, kept) of each engine."""
    return [(engine.loaded, engine.kept) for engine in engines if isinstance(engine, Loads)]


@pytest.fixture(scope="module")
def whole(model: Path) -> bytes:
    """The bytes of the undisturbed gradient."""
    port = free_ports()
    coordinator = start_coordinator(config_of(model), port)
    with thread_nodes(("a", HERE, port)):
        coordinator.send_adapter()
        coordinator.fleet.wait_for_nodes(1, 1, 60.0)
        result = coordinator.gradient().tobytes()
        coordinator.fleet.close("the test is over")
    return result


def test_nodes_started_by_hand_serve_a_restarted_coordinator_without_loading_the_model_again(
    model: Path, whole: bytes
) -> None:
    port = free_ports()
    first = start_coordinator(config_of(model), port, incarnation=1)
    with thread_nodes(("a", HERE, port), ("b", HERE, port)) as nodes:
        first.send_adapter()
        first.fleet.wait_for_nodes(2, 2, 60.0)
        first.fleet._begin(request())  # killed while both have work
        first.crash()
        second = start_coordinator(config_of(model), port, incarnation=2)
        second.send_adapter()
        second.fleet.wait_for_nodes(2, 2, 60.0)
        assert second.gradient().tobytes() == whole
        assert [loaded for loaded, _ in loads(*(node.engine for node in nodes))] == [1, 1]
        second.fleet.close("the test is over")


@pytest.mark.parametrize(
    "sight",
    [
        m.VectorBlock,
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in (m.VectorOffer, m.VectorEnd, m.LeafAnswer)),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in (m.Loaded, m.Hello)),
    ],
)
def test_a_data_connection_that_is_reset_costs_a_new_session_and_no_bit(
    sight: type[m.Message], model: Path, whole: bytes
) -> None:
    port = free_ports()
    proxy = Proxy(port).start()
    coordinator = start_coordinator(config_of(model), port)
    reset = proxy.when(UP, lambda message: isinstance(message, sight), lambda seen: proxy.cut())
    try:
        with thread_nodes(("a", HERE, proxy.ports[CONTROL])) as (node,):
            coordinator.send_adapter()
            coordinator.fleet.wait_for_nodes(1, 1, 60.0)
            assert coordinator.gradient().tobytes() == whole
            assert reset.fired.is_set()
            assert [loaded for loaded, _ in loads(node.engine)] == [1]
            assert not proxy.saw(DOWN, m.Restart)
            assert len({message.session for message in proxy.saw(UP, m.Hello)}) == 2 or sight is m.Hello
            assert coordinator.cluster.transfers.pool.held == 1  # the sum, which is released at the next request
            coordinator.fleet.close("the test is over")
    finally:
        proxy.close()


def test_a_node_that_was_given_up_while_stopped_is_refused_and_joins_again_with_its_model(
    model: Path, whole: bytes
) -> None:
    port = free_ports()
    proxy = Proxy(port).start()
    coordinator = start_coordinator(config_of(model), port, suspect_seconds=1.0, dead_seconds=2.0)
    stopped, continued = threading.Event(), threading.Event()

    def stand_still(seen: Seen) -> None:
        stopped.set()
        wait_for(continued, "SIGCONT")

    proxy.when(UP, lambda message: isinstance(message, m.LeafAnswer), stand_still)
    proxy.when(UP, lambda message: isinstance(message, m.Heartbeat) and stopped.is_set(), stand_still)
    try:
        with thread_nodes(("a", HERE, proxy.ports[CONTROL]), ("b", HERE, port)) as nodes:
            coordinator.send_adapter()
            coordinator.fleet.wait_for_nodes(2, 2, 60.0)
            old = coordinator.cluster.nodes["a"].session
            assert coordinator.gradient().tobytes() == whole
            assert stopped.is_set()
            assert coordinator.cluster.nodes["a"].gone
            continued.set()
            coordinator.fleet.wait_for_nodes(2, 2, 60.0)
            assert coordinator.cluster.nodes["a"].session != old
            assert any(stale.session == old and stale.what == "LeafAnswer" for stale in proxy.saw(DOWN, m.Stale))
            assert coordinator.gradient(2).tobytes() == whole
            assert [loaded for loaded, _ in loads(nodes[0].engine)] == [1]
            assert not proxy.errors
            coordinator.fleet.close("the test is over")
    finally:
        continued.set()
        proxy.close()
