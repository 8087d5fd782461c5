"""The coordinator's cluster against scripted nodes: who may join, and what a round asks and takes."""

import numpy as np
import pytest

from mlxdist.protocol import manifest as manifests
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import MismatchError
from mlxdist.protocol.messages import SessionId
from mlxdist.protocol.numerics import WORKER_ENVIRONMENT
from mlxdist.protocol.transport import CONTROL, DATA, Parcel
from mlxdist.protocol.tree import Span
from mlxdist.protocol.vectors import BLOCK_ELEMENTS, WINDOW, digest
from tests.coordinator.cluster.scripted_node import (
    ADAPTER,
    ELEMENTS,
    MANIFEST,
    MODEL_HASH,
    PARTIAL,
    SPEC,
    Bench,
    ScriptedNode,
    give_back,
    introduction,
    new_cluster,
    request_of,
    restarted,
    snapshot,
    turned_away,
    working,
)

# ---- joining


def test_a_node_is_admitted_welcomed_tried_and_given_the_adapter() -> None:
    bench = Bench()
    bench.cluster.set_adapter(3, ADAPTER)
    node = ScriptedNode(bench, "mini-1")
    node.enlist()
    session = SessionId("run", 5, node.session.number)
    assert node.heard(m.Accept, CONTROL) == [m.Accept(session, 7001, 2.0, WORKER_ENVIRONMENT, 1.0)]
    assert node.state == "connecting"
    node.hello()
    assert node.heard(m.Welcome) == [m.Welcome(node.session, SPEC)]
    assert node.state == "loading"
    node.say(introduction(node.session))
    assert node.heard(m.Canary) == [m.Canary(node.session)]
    assert bench.cluster.ready() == []
    node.say(m.CanaryAnswer(node.session, ("a", "a", "a")))
    assert node.state == "ready"
    (offer,) = node.heard(m.VectorOffer)
    assert (offer.kind, offer.adapter_version, offer.elements, offer.slice_stop) == ("adapter", 3, ELEMENTS, ELEMENTS)
    node.say(m.Credit(node.session, offer.stream, 1))
    mail = bench.mail.pop((DATA, node.data))
    assert mail == [
        (m.VectorBlock(node.session, offer.stream, 0), ADAPTER.tobytes()),
        (m.VectorEnd(node.session, offer.stream, digest(ADAPTER)), b""),
    ]
    assert not bench.failure


def test_every_node_has_a_session_of_its_own_and_the_first_worker_gives_the_manifest() -> None:
    bench = Bench()
    nodes = bench.ready("b", "a", "c")
    assert len({node.session for node in nodes}) == 3
    assert [node.name for node in bench.cluster.ready()] == ["a", "b", "c"]
    assert bench.cluster.manifest == MANIFEST


def test_a_supervisor_that_asks_twice_keeps_its_session() -> None:
    bench = Bench()
    node = ScriptedNode(bench, "mini-1")
    node.enlist()
    node.enlist()
    first, second = node.heard(m.Accept, CONTROL)
    assert first == second


def two_supervisors(bench: Bench, **host: str) -> tuple[ScriptedNode, ScriptedNode]:
    """The first of a name is ready; the second one asks."""
    (first,) = bench.ready("mini-1")
    bench.mail.clear()
    second = ScriptedNode(bench, "mini-1", pid=2)
    second.enlist(**host)
    return first, second


TAKEN = "a node named 'mini-1' takes part already; give this one another name"


def test_a_second_supervisor_of_a_name_waits_while_the_first_is_tried_and_is_refused_when_that_one_beats() -> None:
    bench = Bench()
    first, second = two_supervisors(bench)
    before = snapshot(bench)
    assert first.heard(m.HeartbeatAck, CONTROL) == [m.HeartbeatAck(first.session)]  # is its connection still there?
    for beats in (1, 2):
        second.enlist()
        assert second.heard(m.Message, CONTROL) == [], beats  # it is to ask again
        first.beat()
    second.enlist()
    assert second.heard(m.Message, CONTROL) == [m.Reject(TAKEN)]
    assert snapshot(bench) == before


def test_a_second_supervisor_on_another_host_is_refused_at_once() -> None:
    bench = Bench()
    first, second = two_supervisors(bench, host="mini-2.local")
    assert second.heard(m.Message, CONTROL) == [m.Reject(TAKEN)]
    assert first.state == "ready"


@pytest.mark.parametrize("sign", ["silent", "closed", "left"])
def test_a_supervisor_restarted_takes_the_place_of_the_first_as_soon_as_that_one_is_seen_to_be_gone(
    sign: str,
) -> None:
    bench = Bench()
    first, second = two_supervisors(bench)
    bench.cluster.set_adapter(3, ADAPTER)
    bench.begin(request_of(2))
    session, attempt = first.session, first.attempt
    if sign == "silent":
        bench.tick(3.5)
    elif sign == "closed":
        bench.cluster.unreachable(Parcel(CONTROL, first.control, []), bench.now)
    else:
        first.tell(m.Leave(session))
    second.enlist()
    (admit,) = second.heard(m.Accept, CONTROL)
    assert admit.session == second.session != session
    assert len(bench.cluster.nodes) == 1
    before = snapshot(bench)
    bench.post(DATA, first.data, *first.answer(0, session=session, attempt=attempt))
    bench.post(CONTROL, first.control, m.Heartbeat(session, 2))
    assert snapshot(bench) == before  # the first one's session is over
    second.get_ready()
    assert second.work == [Span(0, 2)]
    assert second.attempt != attempt


@pytest.mark.parametrize(
    "name", ["", "..", "../../etc/x", "a/b", "a\\b", "a b", "-x", ".x", "x" * 65, "ö", "a\n", "[red]"]
)
def test_a_name_that_could_not_name_a_file_is_refused(name: str) -> None:
    bench = Bench()
    bench.post(CONTROL, b"peer", m.Register(m.PROTOCOL_VERSION, name, 0, {}))
    ((refusal, _),) = bench.mail[CONTROL, b"peer"]
    assert isinstance(refusal, m.Reject)
    assert "--name" in refusal.reason
    assert not bench.cluster.nodes


def test_a_supervisor_at_the_data_port_is_told_so() -> None:
    bench = Bench()
    bench.post(DATA, b"peer", m.Register(m.PROTOCOL_VERSION, "mini-1", 0, {}))
    ((refusal, _),) = bench.mail[DATA, b"peer"]
    assert refusal == m.Reject("this is the data port of the run: --connect takes its control port")
    assert not bench.cluster.nodes


def test_after_the_goodbye_no_node_is_admitted() -> None:
    bench = Bench()
    node, _ = bench.ready("mini-1", "mini-2")
    bench.mail.clear()
    bench.cluster.goodbye("all done")
    bench.collect()
    assert node.heard(m.Shutdown) == node.heard(m.Shutdown, CONTROL) == [m.Shutdown(node.session, "all done")]
    bench.mail.clear()
    ScriptedNode(bench, "late").enlist()
    assert not bench.mail
    assert set(bench.cluster.nodes) == {"mini-1", "mini-2"}


# ---- who may not join: both values named


def test_another_protocol_is_refused_with_both_versions() -> None:
    bench = Bench()
    bench.post(CONTROL, b"peer", m.Register(99, "mini-1", 0, {}))
    ((refusal, _),) = bench.mail[CONTROL, b"peer"]
    assert isinstance(refusal, m.Reject)
    assert "mini-1 speaks protocol 99, the coordinator 1" in refusal.reason
    assert not bench.cluster.nodes


@pytest.mark.parametrize("package", ["mlx", "mlx-lm"])
def test_another_version_of_a_package_is_refused_with_both_versions(package: str) -> None:
    bench = Bench()
    node = ScriptedNode(bench, "mini-1")
    node.enlist()
    node.hello(**{package: "0.31.0"})
    mine = bench.cluster.settings.versions[package]
    turned_away(node, MismatchError, f"mini-1 has {package} 0.31.0, the coordinator {mine}: install the same version")
    brought = bench.cluster.members.given_up["mini-1"]
    assert "with: pip install mlx==0.32.4 mlx-lm==0.32.2, or start it with: uvx --with mlx==0.32.4" in str(brought)


def test_a_package_that_is_absent_is_refused() -> None:
    bench = Bench()
    node = ScriptedNode(bench, "mini-1")
    node.enlist()
    node.say(m.Hello(node.session, {"mlx": "0.32.4"}))
    turned_away(node, MismatchError, "mini-1 has mlx-lm absent, the coordinator 0.32.2")


def test_another_model_is_refused_with_both_hashes() -> None:
    bench = Bench()
    bench.ready("mini-1")
    node = ScriptedNode(bench, "mini-2")
    node.enlist()
    node.hello()
    node.say(introduction(node.session, model_hash="fedcba9876543210" * 4))
    turned_away(node, MismatchError, "mini-2", "fedcba987654", MODEL_HASH[:12])
    assert [node.name for node in bench.cluster.ready()] == ["mini-1"]


def test_another_manifest_is_refused_with_both_shapes() -> None:
    bench = Bench()
    bench.ready("mini-1")
    node = ScriptedNode(bench, "mini-2")
    node.enlist()
    node.hello()
    node.say(introduction(node.session, manifests.make({tensor.name: (2, 4) for tensor in MANIFEST})))
    turned_away(node, MismatchError, "mini-2", "model.layers.0.q_proj.lora_a: (2, 3) here, (2, 4) there")
    assert bench.cluster.manifest == MANIFEST


def test_a_run_ends_when_every_node_that_it_launched_is_given_up_and_says_why_of_the_first() -> None:
    bench = Bench(new_cluster(launched=frozenset(("mini-1", "mini-2"))))
    for name, version in (("mini-1", "0.1"), ("mini-2", "0.2")):
        assert not bench.failure
        node = ScriptedNode(bench, name)
        node.enlist()
        node.hello(mlx=version)
    assert type(bench.cluster.failure) is MismatchError
    assert "mini-1 has mlx 0.1" in bench.failure


def test_a_node_started_by_hand_keeps_a_run_alive_whose_launched_nodes_are_all_given_up() -> None:
    bench = Bench(new_cluster(launched=frozenset(("mini-1",))))
    (by_hand,) = bench.ready("by-hand")
    node = ScriptedNode(bench, "mini-1")
    node.enlist()
    node.hello(mlx="0.1")
    assert not bench.failure
    by_hand.tell(m.Leave(by_hand.session))
    assert "mini-1 has mlx 0.1" in bench.failure


def test_a_node_that_was_given_up_and_comes_again_takes_part() -> None:
    bench = Bench(new_cluster(launched=frozenset(("mini-1",))))
    node = ScriptedNode(bench, "mini-1")
    node.enlist()
    node.hello(mlx="0.1")
    assert bench.failure
    node = ScriptedNode(bench, "mini-1", pid=2)
    node.get_ready()
    assert not bench.failure
    assert [one.name for one in bench.cluster.ready()] == ["mini-1"]


@pytest.mark.parametrize("digests", [(), ("a",), ("a", "a"), ("a",) * 4])
def test_a_canary_that_was_not_computed_three_times_does_not_count(digests: tuple[str, ...]) -> None:
    bench = Bench()
    node = ScriptedNode(bench, "mini-1")
    node.get_ready(canary=digests)
    restarted(node, "mini-1", f"{len(digests)} canary answers where 3 were due")
    assert bench.cluster.ready() == []


# ---- a round, as it should go


def test_a_round_asks_each_node_for_its_run_and_takes_answers_and_partials() -> None:
    bench = Bench()
    first, second = working(bench, "a", "b")
    current = bench.cluster.round
    assert current is not None
    assert (first.work, second.work) == ([Span(0, 2)], [Span(2, 4)])
    for node, run in ((first, Span(0, 2)), (second, Span(2, 4))):
        assert node.state == "busy"
        mail = bench.mail.pop((DATA, node.data))
        (task,) = [message for message, _ in mail if isinstance(message, m.Assignment)]
        assert (task.verb, task.step, task.adapter_version, task.start, task.stop, task.total) == (
            "gradient",
            4,
            3,
            run.start,
            run.stop,
            4,
        )
        rows = [message.leaf for message, _ in mail if isinstance(message, m.LeafRows)]
        assert rows == list(range(run.start, run.stop))
        for leaf in rows:
            node.say(*node.answer(leaf))
        assert node.state == "busy"
        node.say(node.offer(run))
        assert node.heard(m.Credit) == [m.Credit(node.session, 1, 1)]
        node.send(1, PARTIAL + run.start)
        assert node.state == "ready"
    assert current.complete
    assert [int(numbers[0, 0]) for numbers in current.outputs_in_row_order()] == [0, 1, 2, 3]
    partials = bench.cluster.fetch_partials()
    assert [(span, vector.tobytes()) for span, vector in partials] == [
        (Span(0, 2), PARTIAL.tobytes()),
        (Span(2, 4), (PARTIAL + 2).tobytes()),
    ]
    assert bench.cluster.fetch_partials() == []
    assert bench.cluster.transfers.pool.held == 2
    give_back(bench.cluster, [vector for _, vector in partials])
    assert bench.cluster.transfers.pool.held == 0
    assert not bench.failure


def test_scores_need_no_partials() -> None:
    bench = Bench()
    (node,) = bench.ready("a")
    bench.cluster.set_adapter(3, ADAPTER)
    bench.begin(request_of(3, verb="score"))
    for leaf in (2, 0, 1):
        assert node.state == "busy"
        node.say(*node.answer(leaf))
    assert node.state == "ready"
    assert bench.cluster.round is not None
    assert bench.cluster.round.complete
    assert bench.cluster.nodes["a"].speed.tokens_per_second == 0  # a forward alone is no measure of a step


def test_without_a_ready_node_a_round_waits_says_so_and_is_given_to_the_first_that_is_ready() -> None:
    bench = Bench()
    bench.cluster.set_adapter(3, ADAPTER)
    node = ScriptedNode(bench, "mini-1")
    node.enlist()
    bench.begin(request_of(2))
    assert "paused: 0 of at least 1 nodes can work; waiting for more" in bench.told()
    node.get_ready()
    assert "going on after 0 s: 1 of at least 1 nodes can work" in bench.told()
    assert node.work == [Span(0, 2)]
    assert len(node.heard(m.Assignment)) == 1


def test_fewer_than_min_nodes_pause_a_run_and_the_next_one_ends_the_pause() -> None:
    bench = Bench(new_cluster(min_nodes=2))
    first, second = working(bench, "a", "b")
    second.tell(m.Leave(second.session))
    assert "paused: 1 of at least 2 nodes can work; waiting for more" in bench.told()
    assert first.work == [Span(0, 2)]  # what it has it may finish
    (third,) = bench.ready("c")
    assert "going on after 0 s: 2 of at least 2 nodes can work" in bench.told()
    assert (first.work, third.work) == ([Span(0, 2)], [Span(2, 4)])  # as the first one has work already


def test_a_node_that_joins_within_a_step_is_given_nothing_of_it_while_nothing_is_missing() -> None:
    bench = Bench()
    working(bench, "a", "b")
    (late,) = bench.ready("late")
    assert (late.state, late.work) == ("ready", [])


def test_an_adapter_version_goes_to_a_node_once() -> None:
    bench = Bench()
    (node,) = bench.ready("a")
    for version in (1, 1, 2):
        bench.cluster.set_adapter(version, ADAPTER)
    bench.begin(request_of(1, version=2))
    assert [offer.adapter_version for offer in node.heard(m.VectorOffer)] == [1, 2]


def test_the_reference_goes_to_every_node_once_also_to_one_that_joins_late_or_was_suspect() -> None:
    bench = Bench()
    early, hidden = bench.ready("early", "hidden")
    bench.tick(7.0)
    early.beat()
    bench.cluster.set_reference(ADAPTER)
    bench.cluster.set_adapter(3, ADAPTER)
    (late,) = bench.ready("late")
    hidden.beat()
    bench.begin(request_of(3))
    for node in (early, hidden, late):
        kinds = [offer.kind for offer in node.heard(m.VectorOffer)]
        assert kinds == ["reference", "adapter"], node.name


def test_blocks_go_down_only_under_credit_and_one_window_at_a_time() -> None:
    manifest = manifests.make({"layers.0.lora_a": ((WINDOW + 3) * BLOCK_ELEMENTS, 1)})
    bench = Bench()
    node = ScriptedNode(bench, "a")
    node.get_ready(manifest)
    bench.cluster.set_adapter(1, np.zeros(manifests.size(manifest), np.float32))
    bench.collect()
    (offer,) = node.heard(m.VectorOffer)
    for upto, blocks in ((0, []), (2, [0, 1]), (2, []), (1, []), (5, [2, 3, 4])):
        node.say(m.Credit(node.session, offer.stream, upto))
        assert [block.index for block in node.heard(m.VectorBlock)] == blocks
    node.say(m.Credit(node.session, offer.stream + 1, 10**6))
    assert node.heard(m.VectorBlock) == []
    node.say(m.Credit(node.session, offer.stream, 10**6))
    kinds = [type(message) for message, _ in bench.mail.pop((DATA, node.data))]
    assert kinds == [m.VectorBlock] * (WINDOW + 3 - 5) + [m.VectorEnd]


def test_a_connection_has_one_name() -> None:
    bench = Bench()
    node = ScriptedNode(bench, "a")
    node.enlist()
    node.heard(m.Accept, CONTROL)
    node.tell(m.Register(m.PROTOCOL_VERSION, "b", 0, {}))
    (reject,) = node.heard(m.Reject, CONTROL)
    assert reject.reason == "this connection is a's, and a node has one name"
    assert bench.cluster.nodes.keys() == {"a"}
