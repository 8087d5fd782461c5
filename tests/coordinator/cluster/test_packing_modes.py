"""The mode of packing is one for all nodes: the slowest before the start, and no other afterwards."""

import msgspec
import pytest

from mlxdist.protocol import messages as m
from mlxdist.protocol.packing import APART, BY_PIECE, PACKED
from tests.coordinator.cluster.scripted_node import CANARY, SPEC, Bench, ScriptedNode, introduction, new_cluster


def loaded(node: ScriptedNode, mode: str) -> m.Loaded:
    return msgspec.structs.replace(introduction(node.session), packing=mode)


def come(node: ScriptedNode, mode: str) -> None:
    node.enlist()
    node.hello()
    node.say(loaded(node, mode))


def again(node: ScriptedNode, mode: str) -> None:
    """The node takes up its new session, on a new connection."""
    node.pid += 100
    come(node, mode)


def test_a_node_that_allows_less_has_every_session_begun_again_with_what_it_allows() -> None:
    bench = Bench()
    first, second = bench.ready("first")[0], ScriptedNode(bench, "second")
    before = first.session
    come(second, BY_PIECE)
    assert bench.cluster.packing == BY_PIECE
    assert first.session != before
    assert (first.state, second.state) == ("connecting", "connecting")
    for node in (first, second):
        again(node, BY_PIECE)
        (welcome,) = node.heard(m.Welcome) or [None]
        assert welcome is None or welcome.spec.packing == BY_PIECE
        node.say(m.CanaryAnswer(node.session, CANARY))
        assert node.state == "ready"
    assert "second: second computes rows by piece, so all nodes do" in bench.told()


def test_a_node_that_comes_later_and_allows_less_is_turned_away_with_the_reason() -> None:
    bench = Bench()
    bench.ready("first")
    bench.cluster.begin_promise(1, None)
    late = ScriptedNode(bench, "late")
    come(late, APART)
    (reject,) = late.heard(m.Reject)
    assert "late cannot pack rows as the run does (packed; there: apart)" in reject.reason
    assert bench.cluster.packing == PACKED
    assert bench.cluster.nodes["first"].state.value == "ready"


def test_a_resumed_run_keeps_the_mode_of_its_earlier_sessions() -> None:
    bench = Bench(new_cluster(spec=msgspec.structs.replace(SPEC, packing=BY_PIECE), packing_is_fixed=True))
    node = ScriptedNode(bench, "node")
    come(node, APART)
    (reject,) = node.heard(m.Reject)
    assert "cannot pack rows as the run does (by piece; there: apart)" in reject.reason


@pytest.mark.parametrize("mode", ["", "faster", PACKED])
def test_a_mode_that_was_not_asked_for_is_nonsense(mode: str) -> None:
    bench = Bench(new_cluster(spec=msgspec.structs.replace(SPEC, packing=BY_PIECE)))
    node = ScriptedNode(bench, "node")
    come(node, mode)
    assert node.state not in ("ready", "loading")
    assert "it sent what makes no sense" in bench.told()
    assert bench.cluster.packing == BY_PIECE
