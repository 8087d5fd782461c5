"""Messages that do not count: of another step, session or manifest, half partials, and what no node can say."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import MismatchError
from mlxdist.protocol.messages import Message
from mlxdist.protocol.transport import CONTROL, DATA, Parcel
from mlxdist.protocol.tree import Span
from mlxdist.protocol.wire import encode
from tests.coordinator.cluster.scripted_node import (
    ELEMENTS,
    PARTIAL,
    Bench,
    ScriptedNode,
    give_back,
    introduction,
    restarted,
    snapshot,
    turned_away,
    working,
)
from tests.protocol.example_messages import ANY_MESSAGE

# ---- what does not count


NOW = "this is step 4, adapter version 3"
STALE = [
    pytest.param({"step": 3}, NOW, id="an earlier step"),
    pytest.param({"step": 5}, NOW, id="a later step"),
    pytest.param({"attempt": 0}, "attempt 0 is not a's work in step 4", id="an earlier attempt"),
    pytest.param({"attempt": 3}, "attempt 3 is not a's work in step 4", id="a later attempt"),
    pytest.param({"adapter_version": 2}, NOW, id="an earlier adapter"),
    pytest.param({"adapter_version": 4}, NOW, id="a later adapter"),
]


@pytest.mark.parametrize(("change", "what"), STALE)
def test_an_answer_to_another_step_attempt_or_adapter_is_stale_and_changes_nothing(
    change: dict[str, int], what: str
) -> None:
    bench = Bench()
    node, _ = working(bench, "a", "b")
    before = snapshot(bench)
    bench.mail.clear()
    node.say(*node.answer(0, **change))
    (stale,) = node.heard(m.Stale)
    assert (stale.session, stale.stream, stale.over) == (node.session, 0, False)
    assert what in stale.what
    node.say(node.offer(Span(0, 2), stream=9, **change))
    (stale,) = node.heard(m.Stale)
    assert (stale.session, stale.stream, stale.over) == (node.session, 9, False)
    assert snapshot(bench) == before


@pytest.mark.parametrize("span", [Span(0, 1), Span(1, 2)], ids=str)
def test_an_offer_of_what_is_not_the_nodes_missing_subtree_is_stale_and_changes_nothing(span: Span) -> None:
    bench = Bench()
    node, _ = working(bench, "a", "b")
    before = snapshot(bench)
    node.say(node.offer(span, stream=3))
    assert [stale.stream for stale in node.heard(m.Stale)] == [3]
    assert snapshot(bench) == before


@pytest.mark.parametrize(
    "change", [{"run": "another"}, {"incarnation": 4}, {"incarnation": 6}, {"number": "9"}], ids=str
)
def test_a_message_of_another_session_is_stale_and_changes_nothing(change: dict[str, Any]) -> None:
    bench = Bench()
    node, _ = working(bench, "a", "b")
    session = msgspec.structs.replace(node.session, **change)
    answer, payload = node.answer(0, session=session)
    bench.tick(5.0)
    before = snapshot(bench)
    sent: list[tuple[str, Message]] = [
        (DATA, answer),
        (DATA, node.offer(Span(0, 2), session=session)),
        (DATA, m.VectorBlock(session, 1, 0)),
        (DATA, m.VectorEnd(session, 1, "")),
        (DATA, m.Fault(session, "error", "something")),
        (DATA, m.Hello(session, {})),
        (CONTROL, m.Heartbeat(session, 2)),
        (CONTROL, m.WorkerExit(session, "killed", ())),
        (CONTROL, m.Leave(session)),
    ]
    for channel, message in sent:
        peer = node.data if channel == DATA else node.control
        bench.mail.clear()
        bench.post(channel, peer, message, payload if message is answer else b"")
        assert bench.mail == {(channel, peer): [(m.Stale(session, type(message).__name__, over=True), b"")]}
    assert snapshot(bench) == before
    bench.tick(2.0)
    assert node.state == "suspect"  # the beat of another session did not count


def test_a_connection_that_is_not_the_workers_changes_nothing() -> None:
    bench = Bench()
    node, _ = working(bench, "a", "b")
    answer, payload = node.answer(0)
    before = snapshot(bench)
    for message in (
        answer,
        node.offer(Span(0, 2)),
        m.Fault(node.session, "error", "x"),
        m.CanaryAnswer(node.session, ("b",) * 3),
    ):
        bench.mail.clear()
        bench.post(DATA, b"stranger", message, payload)
        ((stale, _),) = bench.mail[DATA, b"stranger"]
        assert isinstance(stale, m.Stale)
    assert snapshot(bench) == before


def test_answers_between_rounds_are_stale() -> None:
    bench = Bench()
    (node,) = bench.ready("a")
    answer = m.LeafAnswer(node.session, 1, 1, 0, 0, 1, 0.5, 0)
    before = snapshot(bench)
    node.say(answer, b"1234")
    assert [stale.what for stale in node.heard(m.Stale)] == ["no step is in work"]
    assert snapshot(bench) == before


def test_the_first_answer_to_a_leaf_counts() -> None:
    bench = Bench()
    node, _ = working(bench, "a", "b")
    node.say(*node.answer(0))
    answer, _ = node.answer(0)
    node.say(answer, np.float32([99]).tobytes())
    assert bench.cluster.round is not None
    assert bench.cluster.round.answers[0].tolist() == [[0.0]]


def test_bytes_that_are_no_message_are_refused_and_change_nothing() -> None:
    bench = Bench()
    node, _ = working(bench, "a", "b")
    before = snapshot(bench)
    for channel, peer in ((CONTROL, node.control), (DATA, node.data), (DATA, b"stranger")):
        for frames in ([], [b"GET / HTTP/1.1"], [b"", b"", b""], [*encode(m.Reject("x"))[:2], b"more"]):
            bench.mail.clear()
            bench.cluster.receive(Parcel(channel, peer, frames), bench.now)
            bench.collect()
            ((refusal, _),) = bench.mail[channel, peer]
            assert isinstance(refusal, m.Reject)
    assert snapshot(bench) == before


@pytest.mark.parametrize(
    "change",
    [
        {"elements": ELEMENTS + 1, "slice_stop": ELEMENTS + 1},
        {"elements": ELEMENTS - 1},
        {"elements": 0, "slice_stop": 0},
        {"slice_start": 1},
        {"slice_stop": ELEMENTS - 1},
        {"slice_start": -1},
        {"kind": "adapter"},
        {"kind": ""},
    ],
    ids=str,
)
def test_a_vector_of_another_manifest_or_slice_is_refused(change: dict[str, Any]) -> None:
    bench = Bench()
    node, other = working(bench, "a", "b")
    node.say(node.offer(Span(0, 2), **change))
    turned_away(node, MismatchError, f"a offers a vector that is not of this run's manifest ({ELEMENTS} elements)")
    assert sorted(other.work) == [Span(0, 2), Span(2, 4)]
    assert bench.cluster.transfers.pool.held == 0
    assert bench.cluster.fetch_partials() == []


# ---- what a node cannot say


@pytest.mark.parametrize(
    ("columns", "payload"),
    [(0, b""), (0, b"1234"), (-1, b"1234"), (1, b""), (1, b"123"), (1, b"12345678"), (2, b"1234"), (10**12, b"1234")],
    ids=str,
)
def test_row_numbers_of_another_size_are_refused(columns: int, payload: bytes) -> None:
    bench = Bench()
    node, _ = working(bench, "a", "b")
    answer, _ = node.answer(0, columns=columns)
    node.say(answer, payload)
    restarted(node, "a: it sent what makes no sense: the answer to leaf 0", f"{len(payload)} bytes")
    assert bench.cluster.round is not None
    assert bench.cluster.round.answers == {}


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), float("-inf")])
def test_a_time_that_is_none_does_not_touch_the_measured_speed(seconds: float) -> None:
    bench = Bench()
    node, _ = working(bench, "a", "b")
    node.say(*node.answer(0))
    assert bench.cluster.nodes["a"].speed.tokens_per_second == 16.0
    node.say(*node.answer(1, seconds=seconds))
    assert bench.cluster.nodes["a"].speed.tokens_per_second == 16.0


def out_of_turn(node: ScriptedNode) -> dict[str, tuple[str, Message]]:
    session = node.session
    return {
        "a second model": (DATA, introduction(session)),
        "a second canary": (DATA, m.CanaryAnswer(session, ("a",) * 3)),
        "a beat as data": (DATA, m.Heartbeat(session, 2)),
        "a task": (DATA, m.Assignment(session, "gradient", 1, 1, 1, 0, 1, 1, "sft", "current", {})),
        "an admission": (CONTROL, m.Accept(session, 1, 1.0, {}, 1.0)),
        "a leaf as control": (CONTROL, node.answer(0)[0]),
        "a stale": (DATA, m.Stale(session, "you")),
    }


@pytest.mark.parametrize(
    "what",
    [
        "a second model",
        "a second canary",
        "a beat as data",
        "a task",
        "an admission",
        "a leaf as control",
        "a stale",
    ],
)
def test_a_worker_that_speaks_out_of_turn_is_restarted_and_its_work_goes_to_others(what: str) -> None:
    bench = Bench()
    node, other = working(bench, "a", "b")
    channel, message = out_of_turn(node)[what]
    bench.post(channel, node.data if channel == DATA else node.control, message)
    restarted(node, "a: it sent what makes no sense")
    assert sorted(other.work) == [Span(0, 2), Span(2, 4)]


def test_a_worker_that_speaks_before_its_hello_is_not_heard() -> None:
    bench = Bench()
    node = ScriptedNode(bench, "a")
    node.enlist()
    node.say(introduction(node.session))
    assert len(node.heard(m.Stale)) == 1
    assert bench.cluster.introduction is None


@pytest.mark.slow
@settings(max_examples=200)
@given(st.data())
def test_no_message_of_any_node_stops_the_coordinator(data: st.DataObject) -> None:
    bench = Bench()
    nodes = working(bench, "a", "b")
    newcomer = ScriptedNode(bench, "c")
    newcomer.enlist()
    sessions = [node.session for node in (*nodes, newcomer)]
    current = {"step": 4, "attempt": 1, "adapter_version": 3, "stream": 1, "leaf": 0, "start": 0, "stop": 2}
    for _ in range(data.draw(st.integers(1, 5))):
        message = data.draw(ANY_MESSAGE)
        if "session" in message.__struct_fields__ and data.draw(st.booleans()):
            message = msgspec.structs.replace(message, session=data.draw(st.sampled_from(sessions)))
        known = {name: value for name, value in current.items() if name in message.__struct_fields__}
        if known and data.draw(st.booleans()):
            message = msgspec.structs.replace(message, **known)
        channel = data.draw(st.sampled_from([CONTROL, DATA]))
        node = data.draw(st.sampled_from((*nodes, newcomer)))
        peer = node.data if channel == DATA else node.control
        bench.post(channel, peer, message, data.draw(st.sampled_from([b"", b"1234", PARTIAL.tobytes()])))
        bench.tick(data.draw(st.sampled_from([0.0, 1.0, 7.0])))
        give_back(bench.cluster, [vector for _, vector in bench.cluster.fetch_partials()])
        bench.collect()
    assert bench.cluster.transfers.pool.held >= 0
