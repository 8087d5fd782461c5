"""Macs that come and go while a run trains, each in its own way, and the bits are those of one machine."""

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from mlxdist.coordinator.config.hosts import CoordinatorHost, Hosts
from mlxdist.coordinator.report.follower import Follower
from mlxdist.coordinator.run import run
from mlxdist.keys.store import FOLDER, KeyStore
from tests.faults.fault_runs import CALM, config_of, sha
from tests.faults.idle_mac import IdleMac, idle_mac
from tests.faults.idle_mac import why_not as no_idle_mac
from tests.faults.join_desk import CTRL_C, WAIT, Desk
from tests.faults.namespaces import ADDRESS, COORDINATOR, PORT, OfficeNodes, office_nodes, why_not
from tests.faults.test_network_faults import Watched, meanwhile, node_news

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
STEPS = 8
TIMING = replace(CALM, beat_seconds=1.0)  # a node makes a new connection when eight beats have no answer


@dataclass
class Held:
    """A run that stands still after some of its steps, until a test lets it go on: what happens there needs no luck."""

    after: tuple[int, ...]
    reached: Mapping[int, threading.Event] = field(init=False)
    released: Mapping[int, threading.Event] = field(init=False)

    def __post_init__(self) -> None:
        self.reached, self.released = ({step: threading.Event() for step in self.after} for _ in range(2))

    def listen(self, event: Mapping[str, Any]) -> None:
        """Holds the training where it has told one of the steps. The nodes are served all the time."""
        if event["event"] == "train" and (step := event["step"]) in self.after:
            self.reached[step].set()
            self.released[step].wait(WAIT)

    def at(self, step: int, watched: Watched, act: Callable[[], None]) -> None:
        """Does something while the run stands after a step."""
        watched.until(self.reached[step].is_set, f"step {step}")
        act()
        self.released[step].set()


@pytest.fixture
def macs(tmp_path: Path) -> Iterator[OfficeNodes]:
    """A coordinator and three Macs that have joined it once."""
    if reason := why_not() or no_idle_mac():
        pytest.skip(reason)
    with office_nodes(tmp_path, others=("a", "b", "c")) as macs:
        for name in macs.office.names:
            macs.admit(name)
            public, now = macs.store.coordinator_pair().public, datetime.now(UTC)
            KeyStore(macs.home(name) / FOLDER).trust(COORDINATOR, public, now=now, port=PORT, name=name)
        yield macs


@pytest.fixture
def desk(macs: OfficeNodes, model: Path, tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(macs, tmp_path, model)
    yield desk
    desk.end()


@pytest.fixture
def idle(tmp_path: Path) -> Iterator[IdleMac]:
    with idle_mac(tmp_path) as mac:
        yield mac


def test_macs_leave_by_ctrl_c_by_a_touch_and_when_they_are_forgotten_and_others_come(desk: Desk, idle: IdleMac) -> None:
    """Two Macs are needed, so that the run waits for the next one wherever one has left."""
    held, folder = Held((2, 4, 6)), desk.folder / "run"
    a = desk.type("a", "join", ADDRESS, terminal=True)
    b = desk.type("b", "join", ADDRESS)
    c = desk.type("c", "join", ADDRESS, "--while-idle", under=idle.under)

    def ctrl_c_on_a() -> None:
        c.until("waits until no one uses this Mac")
        assert "it works" not in c.said
        a.press(CTRL_C)
        assert a.ends() == 130
        a.until(f"left {ADDRESS}")
        idle.rest()

    def touch_c() -> None:
        idle.touch()
        c.until("waits until no one uses this Mac", times=2)
        desk.type("a", "join", ADDRESS)

    def forget_b() -> None:
        assert desk.type("coordinator", "nodes", "forget", "b").ends() == 0
        b.until("refused: its key was taken off the list")
        assert b.ends() == 1
        idle.rest()

    def come_and_go(watched: Watched) -> None:
        for step, act in ((2, ctrl_c_on_a), (4, touch_c), (6, forget_b)):
            held.at(step, watched, act)

    hosts = Hosts(None, CoordinatorHost(bind=COORDINATOR, port=PORT, min_nodes=2), ())
    with desk.macs.office.inside(), meanwhile(folder, come_and_go):
        assert (
            run(
                config_of(desk.model, folder, "sft", steps=STEPS, timing=TIMING),
                hosts,
                resume=False,
                environ={"MLXDIST_PLAIN": "1"},
                keys=desk.macs.store,
                follower=Follower(listen=held.listen),
            )
            == 0
        )
    c.until("no one uses this Mac: it works", times=2)
    assert sha(folder) == desk.one_machine(STEPS)
    changes = [line.split()[:2] for line in node_news(folder) if line.split()[1] in ("left", "dead")]
    assert changes == [["a", "left"], ["c", "left"], ["b", "left"]], "no one was missed, each said that it left"
    listed = desk.type("coordinator", "nodes")
    assert listed.ends() == 0
    for name in ("a", "c"):
        assert re.search(rf"(?m)^{name} +20\S+ +20\S+ \S+ +\S.* [0-9a-f]{{8}}  +[\d,]+ +[0-9a-f]{{8}}\s*$", listed.said)
    assert not re.search("(?m)^b ", listed.said)
