"""A data connection that is dead without a sign is found by a ping, and a slow one is not taken for dead."""

import numpy as np
import pytest

from mlxdist.protocol import manifest as manifests
from mlxdist.protocol import messages as m
from mlxdist.protocol.manifest import Manifest
from mlxdist.protocol.transport import CONTROL, DATA, Parcel
from mlxdist.protocol.tree import Span
from mlxdist.protocol.vectors import BLOCK_BYTES, digest
from tests.coordinator.cluster.scripted_node import Bench, ScriptedNode, request_of, working

BLOCKS = 3
LARGE: Manifest = manifests.make({"layers.0.lora_a": (BLOCKS * BLOCK_BYTES // 4, 1)})
VECTOR = np.ones(manifests.size(LARGE), np.float32)


def pass_time(bench: Bench, seconds: float, *nodes: ScriptedNode, pid: int = 2, serving: bool = True) -> None:
    """Lets seconds pass, one by one, with the heartbeats of the nodes."""
    for _ in range(round(seconds)):
        bench.tick(1.0)
        for node in nodes:
            node.tell(m.Heartbeat(node.session, pid, serving))


def silent(bench: Bench, node: ScriptedNode, *nodes: ScriptedNode) -> None:
    """The data connection of a node falls silent, and is given up."""
    old, timing = node.session, bench.cluster.settings.timing
    bench.deaf.add(node.data)
    pass_time(bench, timing.beat_seconds + timing.data_seconds, node, *nodes)
    assert node.session == old, "too early"
    pass_time(bench, 2, node, *nodes)
    assert node.session != old
    assert any(stale.over and stale.session == old for stale in node.heard(m.Stale, CONTROL))


def test_a_connection_without_an_answer_is_replaced_in_seconds_and_its_worker_keeps_the_model() -> None:
    bench = Bench()
    a, b = working(bench, "a", "b")
    bench.told()
    silent(bench, a, b)
    assert a.state == "connecting"
    assert {leaf for span in b.work for leaf in range(span.start, span.stop)} == {0, 1, 2, 3}
    assert not any(bench.cluster.round.crashes.values())  # type: ignore[union-attr]
    assert "gave no sign for 13 s, and its heartbeats come; its worker makes a new one, and keeps" in bench.told()
    bench.deaf.clear()
    a.get_ready()
    assert a.state == "ready"
    assert not a.heard(m.Restart, CONTROL)


def test_an_answer_or_any_other_message_keeps_a_connection() -> None:
    bench = Bench()
    a, b = working(bench, "a", "b")
    old = a.session
    pass_time(bench, 25, a, b)  # both answer pings, and compute for long
    bench.deaf.add(a.data)
    for _ in range(8):
        pass_time(bench, 9, a, b)
        a.say(m.Progress(a.session, "still here"))
    assert a.session == old


def test_an_answer_to_a_ping_is_no_sign_of_work() -> None:
    """A worker whose computation hangs still answers; it is found by the progress deadline, as before."""
    bench = Bench()
    a, b = working(bench, "a", "b")
    for leaf in (0, 1):
        a.say(*a.answer(leaf))
    for leaf in (2, 3):
        b.say(*b.answer(leaf))
    limit = bench.cluster.scheduler.patience(bench.cluster.nodes["a"])
    pass_time(bench, limit + 1, a, b)
    assert a.state == "connecting"
    assert a.heard(m.Restart, CONTROL)


def test_only_the_connection_of_the_worker_itself_can_answer() -> None:
    bench = Bench()
    a, b = working(bench, "a", "b")
    old = a.session
    bench.deaf.add(a.data)
    for _ in range(14):
        pass_time(bench, 1, a, b)
        bench.post(DATA, b"thief", m.Pong(a.session))
        bench.post(DATA, b.data, m.Pong(a.session))
        bench.post(CONTROL, b.control, m.Pong(a.session))
    assert a.session != old


def test_a_node_that_is_silent_on_both_connections_is_lost_by_its_heartbeats() -> None:
    bench = Bench()
    a, b = working(bench, "a", "b")
    bench.deaf.add(a.data)
    a.beat()
    bench.told()
    pass_time(bench, 16, b)
    assert a.state == "dead"
    assert "gave no sign" not in bench.told()


def test_a_killed_node_is_lost_once_also_where_its_data_connection_is_found_closed_first() -> None:
    bench = Bench()
    a, b = working(bench, "a", "b")
    bench.cluster.unreachable(Parcel(DATA, a.data, []), bench.now)
    pass_time(bench, 3, b)
    bench.cluster.unreachable(Parcel(CONTROL, a.control, []), bench.now)
    bench.told()
    pass_time(bench, 6, b)
    assert a.state == "dead"
    assert "a: its connection stayed closed for 5 s; leaves [0, 2) go to others" in bench.told().splitlines()


def test_a_closed_connection_is_replaced_while_the_heartbeats_come() -> None:
    bench = Bench()
    a, b = working(bench, "a", "b")
    bench.told()
    bench.cluster.unreachable(Parcel(DATA, a.data, []), bench.now)
    bench.deaf.add(a.data)
    pass_time(bench, 6, a, b)
    assert a.state == "connecting"
    assert "a: its data connection stayed closed for 5 s; leaves [0, 2) go to others" in bench.told().splitlines()


def test_no_silence_counts_in_which_the_coordinator_slept() -> None:
    bench = Bench()
    a, b = working(bench, "a", "b")
    old = a.session
    bench.deaf.add(a.data)
    pass_time(bench, 8, a, b)
    bench.now += 3600
    bench.cluster.slept(3600.0, 0.0, bench.now)
    bench.deaf.clear()
    a.say(m.Pong(a.session))
    pass_time(bench, 8, a, b)
    assert a.session == old


def carrying(bench: Bench, block_seconds: int) -> tuple[int, str]:
    """The connections that a node needs until a partial is across a link on which a block takes so many seconds."""
    (a,) = bench.ready("a") if "a" not in bench.cluster.nodes else (ScriptedNode(bench, "a"),)
    for sessions in range(1, 20):
        if sessions > 1:
            a.hello()
            a.say(m.Loaded(a.session, "0123456789abcdef" * 4, LARGE))
            a.say(m.CanaryAnswer(a.session, ("same",) * 3))
        session = a.session
        bench.deaf.add(a.data)  # an answer waits behind the blocks
        a.say(*a.answer(0))
        a.say(a.offer(Span(0, 1), stream=sessions, manifest=LARGE))
        for index in range(BLOCKS):
            pass_time(bench, block_seconds, a)
            if a.session != session:
                break
            a.say(m.VectorBlock(session, sessions, index), VECTOR[: BLOCK_BYTES // 4].tobytes())
        else:
            a.say(m.VectorEnd(session, sessions, digest(VECTOR)))
            return sessions, bench.told()
    raise AssertionError("it never arrives")


@pytest.mark.parametrize(("block_seconds", "connections"), [(9, 1), (30, 3), (100, 5)])
def test_a_partial_arrives_over_any_link_however_slow(block_seconds: int, connections: int) -> None:
    """A block of a megabyte in 9 s is a megabit in a second. Where one takes longer, the limit is doubled each time."""
    bench = Bench()
    node = ScriptedNode(bench, "a")
    node.get_ready(LARGE)
    bench.cluster.set_adapter(3, VECTOR)
    bench.begin(request_of(1))
    needed, told = carrying(bench, block_seconds)
    assert needed <= connections, told
    assert bench.cluster.round.complete  # type: ignore[union-attr]
    assert "restarted" not in told
    assert bench.cluster.nodes["a"].silences == 0


def test_a_worker_that_takes_up_no_new_session_is_ended_after_the_time_of_its_leaf() -> None:
    bench = Bench()
    a, b = working(bench, "a", "b")
    for node, leaves in ((a, (0,)), (b, (2, 3))):
        for leaf in leaves:
            node.say(*node.answer(leaf))
    limit = bench.cluster.scheduler.patience(bench.cluster.nodes["a"])
    assert limit < bench.cluster.settings.timing.start_timeout
    silent(bench, a, b)
    pass_time(bench, limit - 3, a, b, serving=False)
    assert not a.heard(m.Restart, CONTROL)
    pass_time(bench, 5, a, b, serving=False)
    assert a.heard(m.Restart, CONTROL)


def test_a_worker_that_cannot_reach_the_data_port_is_named_once_and_left_alone() -> None:
    bench = Bench()
    a, b = working(bench, "a", "b")
    silent(bench, a, b)
    bench.told()
    pass_time(bench, 300, a, b)
    told = bench.told()
    assert told.count("a: its worker is there, and cannot reach the data port 7001: is a firewall between?") == 1
    assert not a.heard(m.Restart, CONTROL)
    bench.deaf.clear()
    a.get_ready()
    assert a.state == "ready"
