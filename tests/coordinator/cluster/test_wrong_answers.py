"""An admitted node that answers wrong is named and its worker restarted; no wrong number counts, no row is blamed."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from mlxdist.coordinator.cluster.membership import HOUR, MOST_RESTARTS
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import NodeError, NonFiniteError
from mlxdist.protocol.transport import CONTROL, DATA
from mlxdist.protocol.tree import Span
from mlxdist.protocol.vectors import Vector
from tests.coordinator.cluster.scripted_node import (
    ADAPTER,
    PARTIAL,
    Bench,
    ScriptedNode,
    failed_with,
    new_cluster,
    request_of,
    restarted,
    working,
)

BAD_VALUES = [np.nan, np.inf, -np.inf, 1e32, -3e38]


def with_value(value: float) -> Vector:
    """A partial that holds this value once."""
    vector = PARTIAL.copy()
    vector[-1] = value
    return vector


def brings(node: ScriptedNode, span: Span, vector: Vector = PARTIAL) -> None:
    """The node answers these leaves and sends their partial, each part of it with the right hash."""
    node.say(node.offer(span, stream=node.bench.cluster.transfers.uploads._newest.get(node.name, 0) + 1))
    node.send(node.bench.cluster.transfers.uploads._newest[node.name], vector)


# ---- NaN and Inf that the worker did not report


@pytest.mark.parametrize("value", BAD_VALUES, ids=str)
def test_a_partial_with_nan_or_inf_does_not_count_and_its_leaves_go_alone_to_the_other_node(value: float) -> None:
    bench = Bench()
    bad, good = working(bench, "bad", "good")
    brings(good, Span(2, 4))
    bad.say(bad.offer(Span(0, 2)))
    bad.send(1, with_value(value))
    restarted(bad, "bad: NaN or Inf in leaves [0, 2) of step 4, which it did not say", "leaves [0, 2) go to others")
    brings(good, Span(0, 1))
    brings(good, Span(1, 2))
    assert sorted(span for span, _ in bench.cluster.fetch_partials()) == [Span(0, 1), Span(1, 2), Span(2, 4)]
    assert bench.cluster.round is not None
    assert bench.cluster.round.complete
    assert not +bench.cluster.round.crashes


def test_nan_in_the_row_outputs_of_a_gradient_is_an_answer_that_its_worker_should_not_have_given() -> None:
    bench = Bench()
    bad, good = working(bench, "bad", "good")
    brings(good, Span(2, 4))
    answer, _ = bad.answer(1)
    bad.say(answer, np.float32([np.nan]).tobytes())
    restarted(bad, "bad: NaN or Inf in leaf 1 of step 4 (rows 1), which it did not say")
    assert Span(1, 2) in good.work


def test_the_rows_are_blamed_only_when_a_second_node_finds_the_same() -> None:
    bench = Bench()
    first, second = working(bench, "a", "b")
    brings(second, Span(2, 4))
    first.say(first.offer(Span(0, 2)))
    first.send(1, with_value(np.nan))
    assert not bench.failure
    alone = second.attempt
    second.say(m.Fault(second.session, "nonfinite", "NaN", 4, alone, second.work[0].start))
    leaf = second.work[0].start if second.work else 0
    failed_with(bench, NonFiniteError, f"leaf {leaf} of step 4", "on a and on b", "lower train.learning_rate")


def test_the_only_node_is_asked_again_after_a_restart_before_the_rows_are_blamed() -> None:
    bench = Bench()
    (node,) = working(bench, "a", leaves=1)
    brings(node, Span(0, 1), with_value(np.inf))
    restarted(node, "a: NaN or Inf in leaf 0 of step 4 (rows 0), which it did not say")
    node.get_ready()
    brings(node, Span(0, 1), with_value(np.inf))
    failed_with(bench, NonFiniteError, "on a, also after its worker was restarted", "`mlxdist selfcheck` on a")


def test_the_only_node_goes_on_when_its_next_worker_computes_the_leaf() -> None:
    bench = Bench()
    (node,) = working(bench, "a", leaves=1)
    brings(node, Span(0, 1), with_value(np.nan))
    node.get_ready()
    brings(node, Span(0, 1))
    assert not bench.failure
    assert bench.cluster.round is not None
    assert bench.cluster.round.complete


@pytest.mark.parametrize("verb", ["gradient", "score"])
def test_a_node_that_finds_nan_where_another_finds_none_was_wrong_and_its_worker_is_restarted(verb: str) -> None:
    bench = Bench()
    bad, good = bench.ready("bad", "good")
    bench.cluster.set_adapter(3, ADAPTER)
    bench.begin(request_of(2, verb=verb))
    mine, other = bad.work[0], good.work[0]
    if verb == "gradient":
        brings(good, other)
        bad.say(m.Fault(bad.session, "nonfinite", "NaN", 4, bad.attempt, mine.start))
    else:
        good.say(*good.answer(other.start))
        answer, _ = bad.answer(mine.start)
        bad.say(answer, np.float32([np.nan]).tobytes())
    assert "computed on another node" in bench.told()
    assert bad.state in ("ready", "busy")
    assert good.work == [mine]
    if verb == "gradient":
        brings(good, mine)
    else:
        good.say(*good.answer(mine.start))
    assert f"bad: good computed leaf {mine.start} of step 4 (rows {mine.start}) without NaN or Inf" in bench.told()
    assert bad.state == "connecting"
    assert not bench.failure


def test_a_worker_that_was_wrong_is_restarted_although_its_session_is_a_new_one_by_then() -> None:
    bench = Bench()
    bad, good = working(bench, "bad", "good", leaves=2)
    brings(good, Span(1, 2))
    bad.beat(7)
    bad.say(m.Fault(bad.session, "nonfinite", "NaN", 4, bad.attempt, 0))
    session = bad.session
    bench.cluster.members.unreachable(DATA, bad.data, bench.now)
    bench.tick(bench.cluster.settings.timing.return_seconds)
    bad.beat(7)  # without heartbeats the node would be lost, not its connection
    bench.tick(0.3)
    assert bad.session != session
    bad.heard(m.Restart, CONTROL)
    brings(good, Span(0, 1))
    assert [restart.worker_pid for restart in bad.heard(m.Restart, CONTROL)] == [0]  # the one that is there
    bad.enlist()  # the supervisor had not taken up the session of that message
    bad.beat(7)
    assert [restart.worker_pid for restart in bad.heard(m.Restart, CONTROL)] == [7]
    bad.beat(8)
    assert bad.heard(m.Restart, CONTROL) == []


def refuted(bench: Bench) -> tuple[ScriptedNode, ScriptedNode]:
    """A node whose NaN another one has refuted, before a heartbeat has named its worker; and the other one."""
    bad, good = working(bench, "bad", "good", leaves=2)
    brings(good, Span(1, 2))
    bad.say(m.Fault(bad.session, "nonfinite", "NaN", 4, bad.attempt, 0))
    brings(good, Span(0, 1))
    assert [restart.worker_pid for restart in bad.heard(m.Restart, CONTROL)] == [0]
    return bad, good


def test_a_restart_that_was_lost_is_said_again_to_a_worker_that_no_heartbeat_had_named_yet() -> None:
    bench = Bench()
    bad, _ = refuted(bench)
    bad.beat(7)  # the message was lost, and the worker is there still
    assert [restart.worker_pid for restart in bad.heard(m.Restart, CONTROL)] == [7]
    bad.beat(0)
    bad.enlist()  # for the new worker
    bad.beat(8)
    assert bad.heard(m.Restart, CONTROL) == []


def test_a_restart_that_was_lost_with_the_connection_is_said_again_when_the_worker_comes_back() -> None:
    bench = Bench()
    bad, good = refuted(bench)
    bench.cluster.members.unreachable(CONTROL, bad.control, bench.now)
    good.beat()
    bench.tick(bench.cluster.settings.timing.return_seconds + 1.0)
    assert bad.state == "dead"
    bad.tell(m.Register(m.PROTOCOL_VERSION, "bad", 7, {}))
    assert [restart.worker_pid for restart in bad.heard(m.Restart, CONTROL)] == [7]
    bad.tell(m.Register(m.PROTOCOL_VERSION, "bad", 0, {}))  # it has ended that worker
    bad.beat(8)
    assert bad.heard(m.Restart, CONTROL) == []


# ---- answers that cannot be right


def offers_twice(node: ScriptedNode) -> None:
    node.say(node.offer(Span(0, 2), stream=1))
    node.say(node.offer(Span(0, 2), stream=2))


def sends_before_it_answers(node: ScriptedNode) -> None:
    node.say(node.offer(Span(0, 2)))
    node.say(m.VectorBlock(node.session, 1, 0), PARTIAL.tobytes())
    node.say(m.VectorEnd(node.session, 1, "0" * 64))
    node.say(node.offer(Span(0, 2), stream=2))
    node.say(m.VectorBlock(node.session, 2, 0), PARTIAL.tobytes())
    from mlxdist.protocol.vectors import digest

    node.say(m.VectorEnd(node.session, 2, digest(PARTIAL)))


NONSENSE: dict[str, tuple[Callable[[ScriptedNode], None], str]] = {
    "a leaf of the other node": (lambda node: node.say(*node.answer(2)), "leaves [2, 3) of attempt 1 were not given"),
    "a leaf of no node": (lambda node: node.say(*node.answer(10**9)), "were not given to it"),
    "a leaf before the first": (lambda node: node.say(*node.answer(-1)), "were not given to it"),
    "the other node's attempt": (lambda node: node.say(*node.answer(2, attempt=2)), "of attempt 2 were not given"),
    "a partial of the other node": (lambda node: node.say(node.offer(Span(2, 4))), "were not given to it"),
    "a partial over nothing": (lambda node: node.say(node.offer(Span(1, 1))), "were not given to it"),
    "a leaf twice": (lambda node: [node.say(*node.answer(0)) for _ in range(2)] and None, "answered before"),
    "a partial twice at once": (offers_twice, "vector 2 of a was offered before"),
    "a partial without answers": (sends_before_it_answers, "came before the answers to its leaves"),
    "a nan of another leaf": (
        lambda node: node.say(m.Fault(node.session, "nonfinite", "NaN", 4, node.attempt, 3)),
        "were not given to it",
    ),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_an_answer_that_cannot_be_right_changes_nothing_and_blames_no_leaf(what: str) -> None:
    bench = Bench()
    node, other = working(bench, "a", "b")
    act, words = NONSENSE[what]
    act(node)
    restarted(node, "a: it sent what makes no sense", words)
    assert sorted(other.work) == [Span(0, 2), Span(2, 4)]
    assert bench.cluster.transfers.pool.held == 0
    assert bench.cluster.round is not None
    assert not +bench.cluster.round.crashes


COLUMNS = ("loss", "policy", "ref")


@pytest.mark.parametrize(
    ("columns", "values", "words"),
    [
        (COLUMNS, [1.0, -2.0], "8 bytes in 2 columns for 1 rows, where 3 columns"),
        (COLUMNS, [1.0, -2.0, -2.5, 0.0], "16 bytes in 4 columns for 1 rows, where 3 columns"),
        (COLUMNS, [0.7, 2.0, -2.5], "a log-probability above 0 (policy 2)"),
        (COLUMNS, [0.7, -2.0, -2.25], "other reference log-probs (ref) than those that were sent"),
        (("loss", "policy"), [3.0, -2.0], "a loss sum that is not that of its log-probabilities"),
    ],
    ids=str,
)
def test_row_outputs_that_are_not_those_of_the_leaf_do_not_count(
    columns: tuple[str, ...], values: list[float], words: str
) -> None:
    bench = Bench()
    node, _ = bench.ready("a", "b")
    bench.cluster.set_adapter(3, ADAPTER)
    inputs = {leaf: {"ref": (-2.5,)} for leaf in range(4)}
    bench.begin(replace(request_of(4), columns=columns, row_inputs=inputs))
    answer, _ = node.answer(0, columns=len(values))
    node.say(answer, np.float32(values).tobytes())
    restarted(node, "a: it sent what makes no sense: the answer to leaf 0 has", words)


@pytest.mark.parametrize("known", [-2.5, float("nan")])
def test_row_outputs_that_fit_count(known: float) -> None:
    bench = Bench()
    node, _ = bench.ready("a", "b")
    bench.cluster.set_adapter(3, ADAPTER)
    bench.begin(replace(request_of(4), columns=COLUMNS, row_inputs={0: {"ref": (known,)}}))
    answer, _ = node.answer(0, columns=3)
    node.say(answer, np.float32([0.7, -2.0, -2.5]).tobytes())
    assert bench.cluster.round is not None
    assert bench.cluster.round.answers[0].tolist() == [[np.float32(0.7), -2.0, -2.5]]


# ---- uploads that do not end


@pytest.mark.parametrize("talks", [False, True])
def test_an_upload_without_blocks_is_stuck_after_progress_seconds_whatever_its_worker_says(talks: bool) -> None:
    bench = Bench()
    node, other = working(bench, "a", "b")
    for leaf in (0, 1):
        node.say(*node.answer(leaf))
    node.say(node.offer(Span(0, 2)))
    for _ in range(33):
        bench.tick(1.0)
        for one in (node, other):
            one.beat()
        if talks:
            node.say(m.Progress(node.session, "nearly there"))
            node.say(m.Credit(node.session, 1, 10**6))
            node.say(m.Received(node.session, 1, whole=True))
    assert node.state == "connecting"
    assert "a: its partial did not come for 31 s; its worker is restarted; leaves [0, 2) go to others" in bench.told()
    assert bench.cluster.round is not None
    assert not +bench.cluster.round.crashes


def test_a_worker_that_computes_a_long_leaf_while_its_last_partial_travels_is_not_stuck() -> None:
    bench = Bench()
    node, other = working(bench, "a", "b")
    other.tell(m.Leave(other.session))
    for leaf in (0, 1):
        node.say(*node.answer(leaf, seconds=10.0))
    node.say(node.offer(Span(0, 2)))
    assert sorted(node.work) == [Span(0, 2), Span(2, 4)]
    for _ in range(45):
        bench.tick(2.0)
        node.beat()
    assert node.state == "busy"
    bench.tick(12.0)
    assert "a: it did nothing for 102 s; its worker is restarted" in bench.told()


# ---- those that do not stop


def is_wrong(node: ScriptedNode) -> None:
    node.say(*node.answer(10**9))


def test_a_node_whose_restarted_workers_are_wrong_again_is_put_out_and_refused_for_the_rest_of_the_run() -> None:
    bench = Bench()
    node, other = working(bench, "a", "b")
    for _ in range(MOST_RESTARTS):
        is_wrong(node)
        assert node.state == "connecting"
        node.get_ready()
        brings(other, other.work[0])
        bench.cluster.scheduler.round = None
        bench.begin(request_of(4))
    bench.told()
    is_wrong(node)
    assert node.state == "left"
    told = bench.told()
    assert told.count("a: turned away: its worker was restarted 3 times within an hour for wrong answers") == 1
    assert "leaves [10" in told
    assert sorted(other.work) == [Span(0, 2), Span(2, 4)]
    bench.mail.clear()
    node.enlist()
    assert [refusal.reason for refusal in node.heard(m.Reject, "control")] != []
    assert not bench.failure


def test_what_was_wrong_more_than_an_hour_ago_is_forgotten() -> None:
    bench = Bench()
    node, _ = working(bench, "a", "b")
    for _ in range(3 * MOST_RESTARTS):
        is_wrong(node)
        bench.now += HOUR / MOST_RESTARTS
        ScriptedNode(bench, "b").get_ready()
        node.get_ready()
        bench.cluster.scheduler.round = None
        bench.begin(request_of(4))
    assert node.state == "busy"


def test_the_only_launched_node_that_is_put_out_ends_the_run_and_no_row_is_named() -> None:
    bench = Bench(new_cluster(launched=frozenset(("a",))))
    (node,) = working(bench, "a")
    for _ in range(MOST_RESTARTS):
        is_wrong(node)
        node.get_ready()
    is_wrong(node)
    failed_with(bench, NodeError, "3 times within an hour", "`mlxdist selfcheck`")
    assert "rows" not in bench.failure
