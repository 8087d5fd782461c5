"""A lost node changes no number: real nodes are killed at the worst moments, and the adapter has the same bits.

The proxy in front of each node acts on the message that marks the moment, and drops what the node would still have
sent, so that the coordinator has half of its work and no more. The first node to reach that moment is killed, so the
test does not depend on how the leaves were split.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from mlxdist.protocol import messages as m
from mlxdist.protocol.messages import Message
from tests.faults.fault_nodes import Caught, FaultNodes
from tests.faults.fault_proxy import UP, Seen
from tests.faults.fault_runs import Undisturbed, config_of, sha, told, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEP = 3  # of the fault: by then all three nodes work
Hurt = Callable[[str], None]


def after_first_answer(nodes: FaultNodes, verb: str, hurt: Hurt) -> Caught:
    """The node has answered one leaf of several and computes the next."""

    def act(name: str, seen: Seen) -> None:
        hurt(name)
        seen.last = True

    return nodes.catch_answer(verb, STEP, act)


def compute(nodes: FaultNodes, hurt: Hurt) -> Caught:
    """The node computes a gradient."""
    return after_first_answer(nodes, "gradient", hurt)


def first_round(nodes: FaultNodes, hurt: Hurt) -> Caught:
    """The node computes scores for KTO's reference point."""
    return after_first_answer(nodes, "score", hurt)


def upload(nodes: FaultNodes, hurt: Hurt) -> Caught:
    """The coordinator has accepted a partial, and a block of it is on its way."""

    def test(name: str, message: Message) -> bool:
        offer = nodes.offer(name, UP, message) if isinstance(message, m.VectorBlock) else None
        return offer is not None and offer.step >= STEP and not nodes.copied(name, nodes.task(name, offer))

    def act(name: str, seen: Seen) -> None:
        hurt(name)
        seen.dropped = seen.last = True

    return nodes.catch(UP, test, act)


def download(nodes: FaultNodes, hurt: Hurt) -> Caught:
    """The node has an assignment, and the adapter for it is on its way."""

    def act(name: str, seen: Seen) -> None:
        hurt(name)
        seen.dropped = seen.last = True

    return nodes.catch_adapter(STEP, act)


@pytest.mark.parametrize("which", ["worker", "supervisor", "both"])
@pytest.mark.parametrize("moment", [compute, upload, first_round, download])
def test_a_kill_in_any_moment_changes_no_bit(
    moment: Callable[[FaultNodes, Hurt], Caught],
    which: str,
    nodes: FaultNodes,
    undisturbed: Undisturbed,
    model: Path,
    tmp_path: Path,
) -> None:
    assert_a_kill_changes_no_bit(moment, which, "kto", nodes, undisturbed, model, tmp_path / "run")


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_a_killed_worker_changes_no_bit_of_the_other_methods(
    method: str, nodes: FaultNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    assert_a_kill_changes_no_bit(compute, "worker", method, nodes, undisturbed, model, tmp_path / "run")


def assert_a_kill_changes_no_bit(
    moment: Callable[[FaultNodes, Hurt], Caught],
    which: str,
    method: str,
    nodes: FaultNodes,
    undisturbed: Undisturbed,
    model: Path,
    folder: Path,
) -> None:
    expected = undisturbed(method)
    nodes.ready("a", "b", "c")
    caught = moment(nodes, lambda name: nodes.kill(name, which))
    assert train(config_of(model, folder, method), nodes.port) == 0
    assert caught.done.is_set(), "no node reached that moment"
    state = "connecting the worker was killed (SIGKILL" if which == "worker" else "dead its connection stayed closed"
    lines = [line for line in told(folder).splitlines() if line.startswith(f"{caught.name} {state}")]
    assert any("; leaves [" in line and line.endswith(" go to others") for line in lines), told(folder)
    assert sha(folder) == expected
