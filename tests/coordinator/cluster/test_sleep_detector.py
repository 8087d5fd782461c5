"""A coordinator that slept does not count the silence of that time, and a clock that jumps loses no node."""

from dataclasses import dataclass, field

import pytest

from mlxdist.coordinator.cluster.events import NodeNews
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.fleet.sleep_detector import Absence
from mlxdist.protocol import messages as m
from mlxdist.protocol.transport import CONTROL
from mlxdist.protocol.wire import decode, encode
from tests.coordinator.cluster.scripted_node import new_cluster
from tests.memory_cluster import RunningCluster

HOURS = 8 * 3600.0
BEAT, DEAD = 2.0, 15.0


@dataclass
class TwoClocks:
    """The monotonic clock and the wall clock of one machine."""

    monotonic: float = 100.0
    wall: float = 1.8e9

    def pass_by(self, seconds: float) -> None:
        self.monotonic += seconds
        self.wall += seconds


@dataclass
class Watched:
    """A fleet with one supervisor, which beats when the test says so."""

    clocks: TwoClocks = field(default_factory=TwoClocks)
    hub: RunningCluster = field(default_factory=RunningCluster)
    news: list[NodeNews] = field(default_factory=list)

    def __post_init__(self) -> None:
        clocks = self.clocks
        self.cluster = new_cluster()
        self.fleet = Fleet(
            self.cluster, self.hub, clock=lambda: clocks.monotonic, wall=lambda: clocks.wall, threaded=False
        )
        self.link = self.hub.connect(CONTROL, b"a")
        self.link.send(encode(m.Register(m.PROTOCOL_VERSION, "a", 0, {"host": "a"})))
        self.look()
        (admit,) = [message for message, _ in map(decode, self.link.down) if isinstance(message, m.Accept)]
        self.session = admit.session

    def look(self) -> None:
        """One round of the poller."""
        self.fleet._pump(0.25)

    def live(self, seconds: float, *, beating: bool) -> None:
        """The coordinator looks four times a second; the supervisor beats or is silent."""
        for tick in range(int(seconds * 4)):
            self.clocks.pass_by(0.25)
            if beating and tick % 8 == 0:
                self.link.send(encode(m.Heartbeat(self.session, 0)))
            self.look()

    @property
    def there(self) -> bool:
        return not self.cluster.nodes["a"].gone

    def told(self) -> list[str]:
        return [news.message for news in self.cluster.news if "slept" in news.message]


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_silent_node_is_lost_in_its_time(watched: Watched) -> None:
    watched.live(20.0, beating=True)
    assert watched.there
    watched.live(DEAD + 1, beating=False)
    assert not watched.there
    assert watched.told() == []


def test_a_coordinator_that_was_stopped_for_hours_loses_no_node(watched: Watched) -> None:
    watched.live(4.0, beating=True)
    watched.clocks.pass_by(HOURS)
    watched.look()
    assert watched.there
    watched.live(20.0, beating=True)
    assert watched.there


def test_a_mac_that_slept_while_its_monotonic_clock_stood_still_gives_every_node_all_its_time_and_says_so(
    watched: Watched,
) -> None:
    watched.live(4.0, beating=True)
    watched.live(DEAD - 2, beating=False)
    watched.clocks.wall += HOURS
    watched.live(DEAD - 2, beating=False)
    assert watched.there
    assert watched.told() == [
        "the coordinator's Mac slept for 28800 s, or its clock was set; its nodes have time to return"
    ]


def test_a_node_that_does_not_return_after_the_sleep_is_lost_in_its_time_and_not_hours_later(watched: Watched) -> None:
    for jump in (
        watched.clocks.pass_by,
        lambda seconds: setattr(watched.clocks, "wall", watched.clocks.wall + seconds),
    ):
        jump(HOURS)
        watched.look()
        assert watched.there
    watched.live(DEAD + 1, beating=False)
    assert not watched.there


@pytest.mark.parametrize("jump", [-HOURS, HOURS])
def test_a_clock_that_is_set_loses_no_node_that_beats(watched: Watched, jump: float) -> None:
    watched.live(4.0, beating=True)
    watched.clocks.wall += jump
    watched.live(60.0, beating=True)
    assert watched.there


def test_a_clock_that_follows_the_network_is_no_sleep() -> None:
    clocks = TwoClocks()
    absence = Absence(lambda: clocks.monotonic, lambda: clocks.wall)
    for slew in (0.001, -0.5, 1.0):
        clocks.pass_by(0.25)
        clocks.wall += slew
        assert absence.since_last_look(2.25) == (0.0, 0.0)
