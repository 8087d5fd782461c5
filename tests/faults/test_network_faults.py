"""Networks that fail: cables cut without a reset, in one direction, for a while, again and again; and a slow one.

Real nodes in network namespaces, with time constants 20 times shorter. In every case the adapter has the bits of the
undisturbed run. The part of the supervisor, which needs no network, is tested here too.
"""

import threading
from _thread import interrupt_main
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.node.supervisor import REGISTER_SECONDS, UNANSWERED_HEARTBEATS, Supervisor
from mlxdist.protocol import messages as m
from mlxdist.protocol.transport import Trouble
from mlxdist.protocol.wire import Frames, encode
from tests.coordinator.cluster.scripted_node import CANARY, Bench, introduction, working
from tests.faults.fault_runs import SHORT, config_of, events, sha
from tests.faults.namespaces import DOWN, UP, OfficeNodes, office_nodes, why_not

NAMES = ("a", "b", "c")
# No copies, so that the run must wait for a node that is cut off; load must not look like a stuck worker.
TIMING = replace(SHORT, copy_factor=1e9, progress_seconds=10.0)
HEAVY_RANK = 288
PARTIAL_BYTES = 4 * 928 * HEAVY_RANK  # the tiny llama's adapter has 928 elements per rank
DIRECTIONS = [pytest.param((UP, DOWN), id="both"), pytest.param((UP,), id="up"), pytest.param((DOWN,), id="down")]
WAIT_SECONDS = 100.0  # for an event in a run

pytestmark = pytest.mark.timeout(400)
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OfficeNodes]:
    """Three nodes for all tests; each test restores them and their cables."""
    if reason := why_not():
        pytest.skip(reason)
    with office_nodes(tmp_path_factory.mktemp("nodes"), *NAMES) as nodes:
        yield nodes


@pytest.fixture
def cables(nodes: OfficeNodes) -> Iterator[OfficeNodes]:
    """The nodes, with cables that are restored after the test."""
    yield nodes
    for name in NAMES:
        nodes.office.restore(name)
        nodes.office.unblock_data(name)


def kto(model: Path, folder: Path) -> RunConfig:
    """The run that most tests disturb."""
    return config_of(model, folder, "kto", steps=9, timing=TIMING)


def heavy(model: Path, folder: Path) -> RunConfig:
    """A run whose partials have more than a megabyte. Shorter times do not make partials smaller, so the times here are
    those of the other tests, except for a longer silence, which is still shorter than one partial on a slow cable.
    """
    config = config_of(model, folder, "sft", steps=2)
    timing = replace(TIMING, suspect_seconds=1.5, dead_seconds=4.0, progress_seconds=20.0, data_seconds=3.0)
    return replace(config, timing=timing, lora=replace(config.lora, rank=HEAVY_RANK))


@pytest.fixture(scope="module")
def undisturbed(
    nodes: OfficeNodes, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Callable[[Path, Path], RunConfig]], str]:
    """The SHA-256 of the adapter of an undisturbed run."""
    known: dict[Callable[[Path, Path], RunConfig], str] = {}

    def of(make: Callable[[Path, Path], RunConfig]) -> str:
        if make not in known:
            folder = tmp_path_factory.mktemp("whole") / "run"
            assert nodes.train(make(model, folder), len(NAMES)) == 0
            known[make] = sha(folder)
        return known[make]

    return of


Undisturbed = Callable[[Callable[[Path, Path], RunConfig]], str]


@dataclass
class Watched:
    """A run in progress, as its metrics.jsonl shows it."""

    folder: Path
    ended: threading.Event = field(default_factory=threading.Event)
    seen: int = 0  # node events that a wait has passed

    def steps(self, count: int) -> None:
        """Waits for so many steps."""
        self.until(lambda: len(events(self.folder, "train")) >= count, f"{count} steps")

    def told(self, *words: str) -> None:
        """Waits for news with one of these words, newer than the news of the last wait."""

        def found() -> bool:
            lines = node_news(self.folder)
            for index in range(self.seen, len(lines)):
                if any(word in lines[index] for word in words):
                    self.seen = index + 1
                    return True
            return False

        self.until(found, " or ".join(words))

    def until(self, look: Callable[[], bool], what: str) -> None:
        """Waits until `look` is true; an assertion fails when the run ends before, or it takes too long."""
        for _ in range(int(WAIT_SECONDS / 0.02)):
            over = self.ended.wait(0.02)
            if look():
                return
            assert not over, f"the run ended before: {what}"
        raise AssertionError(f"waited for {what}, and there was:\n" + "\n".join(node_news(self.folder)))


def node_news(folder: Path) -> list[str]:
    """All news of nodes: name, state, message."""
    return [f"{event['name']} {event['state']} {event['message']}" for event in events(folder, "node")]


@contextmanager
def meanwhile(folder: Path, act: Callable[[Watched], None]) -> Iterator[None]:
    """Runs `act` in a thread during the block; it must finish. Where it fails, the run is interrupted."""
    watched, errors = Watched(folder), list[BaseException]()

    def body() -> None:
        try:
            act(watched)
        except BaseException as error:  # raised again in the test's own thread
            errors.append(error)
            if not watched.ended.is_set():
                interrupt_main()  # the run may wait for something that will not come

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    try:
        yield
    finally:
        watched.ended.set()
        thread.join(WAIT_SECONDS)
    if errors:
        raise errors[0]


@slow
@pytest.mark.parametrize("directions", DIRECTIONS)
def test_a_node_whose_cable_is_cut_for_ever_changes_no_bit(
    directions: tuple[str, ...], cables: OfficeNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    """No connection is closed; only the silence shows it. Another node, cut off until then, takes its place."""
    folder, expected = tmp_path / "run", undisturbed(kto)
    cables.office.cut("c", *directions)

    def cut(run: Watched) -> None:
        run.steps(2)
        cables.office.cut("b", *directions)
        run.told("b dead not heard for")
        cables.office.restore("c")
        run.told("c ready")

    with meanwhile(folder, cut):
        assert cables.train(kto(model, folder), 2) == 0
    assert sha(folder) == expected


@slow
@pytest.mark.parametrize("directions", DIRECTIONS)
def test_a_node_whose_cable_was_cut_for_a_while_comes_back_and_changes_no_bit(
    directions: tuple[str, ...], cables: OfficeNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    """The run needs all three nodes, so it can end only with the one that comes back, which still has its model."""
    folder, expected = tmp_path / "run", undisturbed(kto)

    def cut(run: Watched) -> None:
        run.steps(2)
        cables.office.cut("b", *directions)
        run.told("b dead not heard for")
        cables.office.restore("b")
        run.told("b loading the model is still loaded")

    with meanwhile(folder, cut):
        assert cables.train(kto(model, folder), 3) == 0
    assert sha(folder) == expected


@slow
def test_a_cable_that_flaps_changes_no_bit(
    cables: OfficeNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    """After a short flap the node is suspect, after a long one dead; the run waits, because it needs all three."""
    folder, expected = tmp_path / "run", undisturbed(kto)

    def flap(run: Watched) -> None:
        for step, words in ((1, "b suspect"), (3, "b dead"), (5, "b suspect"), (7, "b dead")):
            run.steps(step)
            cables.office.cut("b")
            run.told(words, "b dead")
            cables.office.restore("b")
            run.told("b ready", "b busy")

    with meanwhile(folder, flap):
        assert cables.train(kto(model, folder), 3) == 0
    assert sha(folder) == expected


@slow
def test_a_switch_that_restarts_changes_no_bit(
    cables: OfficeNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    """All nodes are cut off at once until every one is dead; then all come back."""
    folder, expected = tmp_path / "run", undisturbed(kto)

    def restart(run: Watched) -> None:
        run.steps(2)
        for name in NAMES:
            cables.office.cut(name)
        for name in NAMES:
            Watched(folder, run.ended).told(f"{name} dead")
        for name in NAMES:
            cables.office.restore(name)

    with meanwhile(folder, restart):
        assert cables.train(kto(model, folder), 3) == 0
    assert sha(folder) == expected


@slow
def test_a_node_on_a_slow_cable_is_never_suspect(
    cables: OfficeNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    """At 5 Mbit/s a partial takes longer than a silence may last; heartbeats pass on their own connection."""
    folder, expected = tmp_path / "run", undisturbed(heavy)
    cables.office.slow("b", 5)
    assert cables.train(heavy(model, folder), 3) == 0
    assert sha(folder) == expected
    assert cables.office.bytes_sent("b", UP) > PARTIAL_BYTES, "no partial went over the slow cable"
    assert cables.office.bytes_sent("b", DOWN) > PARTIAL_BYTES, "no adapter went over the slow cable"
    news = node_news(folder)
    assert not any(line.startswith(("b suspect", "b dead")) or "gave no sign" in line for line in news), news


@slow
@pytest.mark.parametrize("direction", [UP, DOWN])
def test_a_cable_cut_in_the_middle_of_a_vector_changes_no_bit(
    direction: str, cables: OfficeNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    """Half a partial, or half an adapter, does not count; the run does not wait for the other half."""
    folder, expected = tmp_path / "run", undisturbed(heavy)
    cables.office.slow("b", 5)

    def cut(run: Watched) -> None:
        run.until(lambda: cables.office.bytes_sent("b", direction) > PARTIAL_BYTES / 4, "a quarter of a vector")
        cables.office.cut("b")
        run.told("b dead not heard for")
        cables.office.restore("b")
        run.told("b loading the model is still loaded")

    with meanwhile(folder, cut):
        assert cables.train(heavy(model, folder), 3) == 0
    assert sha(folder) == expected


@slow
def test_a_data_connection_that_leads_nowhere_changes_no_bit(
    cables: OfficeNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    """Heartbeats do not show it, and a ping does. Another node, cut off until then, takes its place."""
    folder, expected = tmp_path / "run", undisturbed(kto)
    config = kto(model, folder)
    cables.office.cut("c")

    def block(run: Watched) -> None:
        run.steps(2)
        cables.office.block_data("b")
        run.told("b connecting its data connection gave no sign for")
        run.told("b connecting its worker is there, and cannot reach the data port")
        cables.office.restore("c")

    with meanwhile(folder, block):
        assert cables.train(config, 2) == 0
    assert sha(folder) == expected


@slow
def test_a_data_connection_that_leads_nowhere_for_a_while_is_made_again_without_loading_the_model(
    cables: OfficeNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    """The run needs all three nodes, so it can end only with the one whose connection is made again."""
    folder, expected = tmp_path / "run", undisturbed(kto)

    def block(run: Watched) -> None:
        run.steps(2)
        cables.office.block_data("b")
        run.told("b connecting its data connection gave no sign for")
        cables.office.unblock_data("b")
        run.told("b loading the model is still loaded")

    with meanwhile(folder, block):
        assert cables.train(kto(model, folder), 3) == 0
    assert sha(folder) == expected
    assert not any("restarted" in line for line in node_news(folder)), node_news(folder)


@dataclass
class DeafLink:
    """A connection that returns nothing until it is renewed; every wait moves the clock."""

    open: bool = True
    now: float = 0.0
    trouble: Trouble | None = None
    renewed: list[float] = field(default_factory=list)
    answer: m.Message = field(default_factory=lambda: m.Reject("not today"))

    def receive(self, timeout: float) -> list[Frames]:
        """Returns nothing; after `renew`, the answer."""
        self.now += timeout
        return [encode(self.answer)] if self.renewed else []

    def send(self, frames: Frames) -> bool:
        """Takes frames while the connection seems to be open."""
        return self.open

    def renew(self) -> None:
        """Notes the time."""
        self.renewed.append(self.now)

    def wake(self) -> None:
        """Does nothing: nothing waits."""

    def close(self) -> None:
        """Does nothing: nothing is open."""


def supervisor(link: DeafLink) -> Supervisor:
    """A supervisor that gives up after a minute."""
    return Supervisor("a", "nowhere", link, launched=False, wait_seconds=60.0, clock=lambda: link.now)


def test_a_supervisor_without_answers_makes_a_new_connection() -> None:
    """A half-open connection takes every message and delivers none."""
    link = DeafLink()
    one = supervisor(link)
    assert (one.run(threading.Event()), one.reason) == (1, "refused: not today")
    assert len(link.renewed) == 1
    assert link.renewed[0] > UNANSWERED_HEARTBEATS * REGISTER_SECONDS


def test_a_supervisor_without_a_connection_lets_zeromq_connect() -> None:
    """A heartbeat that was not sent does not count as unanswered."""
    link = DeafLink(open=False)
    assert supervisor(link).run(threading.Event()) == 1
    assert link.renewed == []


def losses_until_failure(worker_after: int) -> int:
    """Counts how often a node, which comes back with this worker, may fall silent at one leaf until the run ends."""
    bench = Bench()
    (node,) = working(bench, "a", leaves=2)
    for count in range(1, 20):
        node.beat(worker_pid=7)
        bench.tick(16.0)
        assert node.state == "dead"
        if bench.failure:
            assert "leaf 0 of step 4 (rows 0)" in bench.failure
            return count
        node.tell(m.Register(m.PROTOCOL_VERSION, "a", worker_after, {}))
        node.hello()
        node.say(introduction(node.session))
        node.say(m.CanaryAnswer(node.session, CANARY))
    raise AssertionError("it was retried for ever")


def test_a_node_that_comes_back_with_the_same_worker_was_cut_off_and_its_leaf_is_not_to_blame() -> None:
    assert losses_until_failure(worker_after=7) > 3


@pytest.mark.parametrize("worker", [0, 8])
def test_a_node_that_comes_back_with_another_worker_was_lost_at_its_leaf(worker: int) -> None:
    assert losses_until_failure(worker_after=worker) == 3
