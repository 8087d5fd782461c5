"""Swap and heat of a node's Mac: looked at now and then, sent with heartbeats, told in the events of a run."""

from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.macos import Strain
from mlxdist.node.supervisor import LOOK_SECONDS, Supervisor
from mlxdist.protocol import messages as m
from mlxdist.protocol.limits import Heat
from mlxdist.protocol.transport import Frames
from mlxdist.protocol.wire import decode
from tests.coordinator.cluster.scripted_node import Bench, working

SESSION = m.SessionId("run", 1, "1" * 32)


class Sent:
    """A connection that keeps what is sent."""

    trouble = None

    def __init__(self) -> None:
        self.messages: list[m.Message] = []

    def send(self, frames: Frames) -> bool:
        self.messages.append(decode(frames)[0])
        return True

    def renew(self) -> None:
        """Does nothing: no answer comes over any connection."""


def test_heartbeats_carry_the_last_look_at_the_machine_and_looks_are_rare() -> None:
    now, link, looks = [0.0], Sent(), list[float]()

    def look() -> Strain:
        looks.append(now[0])
        return Strain(1000 + len(looks), "moderate")

    one = Supervisor(
        "a",
        "host",
        link,
        launched=False,
        wait_seconds=1e9,
        clock=lambda: now[0],
        strain=look,  # type: ignore[arg-type]
    )
    one.session, one.heartbeat_seconds = SESSION, 2.0
    for _ in range(30):
        now[0] += 2.0
        one._tick()
    beats = [message for message in link.messages if isinstance(message, m.Heartbeat)]
    assert len(beats) == 30
    assert (beats[0].swap_bytes, beats[0].heat) == (1001, "moderate")
    assert looks == [0.0, LOOK_SECONDS, 2 * LOOK_SECONDS, 3 * LOOK_SECONDS]
    assert beats[-1].swap_bytes == 1004


def test_the_work_of_a_node_has_its_swap_and_heat_and_says_where_they_are_unknown() -> None:
    bench = Bench()
    strained, plain = working(bench, "a", "b", leaves=2)
    heat: Heat = "heavy"
    strained.tell(m.Heartbeat(strained.session, 2, swap_bytes=1_500_000_000, heat=heat))
    plain.beat()
    fleet = Fleet(bench.cluster, None, threaded=False)  # type: ignore[arg-type]
    work = fleet.node_work(0.0)
    assert (work["a"].swap_gb, work["a"].heat) == (1.5, "heavy")
    assert (work["b"].swap_gb, work["b"].heat) == (None, "")
