"""Nodes that are stopped for a while, for ever, or until they were given up; and workers that do nothing."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from mlxdist.protocol import messages as m
from mlxdist.protocol.messages import Message
from tests.faults.fault_nodes import Caught, FaultNodes, a
from tests.faults.fault_proxy import DOWN, UP, Seen, wait_for
from tests.faults.fault_runs import CALM, SHORT, Script, Undisturbed, config_of, sha, told, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEP = 3  # of the fault: by then all three nodes work
OTHERS = " go to others"
SILENCE = replace(CALM, suspect_seconds=SHORT.suspect_seconds, dead_seconds=SHORT.dead_seconds)


def given_a_gradient(_: str, message: Message) -> bool:
    return isinstance(message, m.Assignment) and message.verb == "gradient" and message.step == STEP


def stopped(nodes: FaultNodes, which: str) -> Caught:
    """Sends SIGSTOP to the first node that gets scores to compute, of which there are no copies: it does nothing."""
    given = a(m.Assignment, verb="score", step=STEP)
    return nodes.catch(DOWN, lambda _, message: given(message), lambda name, _: nodes.stop(name, which))


def test_a_node_that_is_stopped_for_a_while_continues_its_work(
    nodes: FaultNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    expected = undisturbed("kto")
    nodes.ready("a", "b", "c")
    caught = stopped(nodes, "both")
    timing = replace(SILENCE, dead_seconds=60.0, return_seconds=60.0)
    with Script(folder, (lambda: f"{caught.name} suspect no heartbeat for ", lambda: nodes.go_on(caught.name))):
        assert train(config_of(model, folder, "kto", timing=timing), nodes.port) == 0
    assert f"{caught.name} busy heard again" in told(folder)
    assert OTHERS not in told(folder)
    assert sha(folder) == expected


def test_a_node_that_is_stopped_for_ever_is_given_up(
    nodes: FaultNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    expected = undisturbed("kto")
    nodes.ready("a", "b", "c")
    caught = stopped(nodes, "both")
    assert train(config_of(model, folder, "kto", timing=SILENCE), nodes.port) == 0
    assert_given_up(caught.name, folder)
    assert sha(folder) == expected


def test_late_answers_of_a_node_that_was_given_up_are_refused_and_it_takes_part_again(
    nodes: FaultNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    expected = undisturbed("kto")
    nodes.ready("a", "b", "c")
    given_up = threading.Event()

    def stop(name: str, _: Seen) -> None:  # its answer is on its way until it is given up
        nodes.stop(name)
        wait_for(given_up, f"the end of {name}")

    caught = nodes.catch_answer("score", STEP, stop)
    again = nodes.leave_the_rest_to(lambda: caught.name, STEP + 1)

    def wake() -> None:
        proxy = nodes.proxies[caught.name]
        proxy.when(UP, a(m.CanaryAnswer), lambda _: again.set())
        proxy.when(DOWN, a(m.Stale, over=True), lambda _: nodes.go_on(caught.name))  # which then closes this connection
        given_up.set()

    with Script(folder, (lambda: f"{caught.name} dead not heard for ", wake)):
        assert train(config_of(model, folder, "kto", timing=SILENCE), nodes.port) == 0
    assert_given_up(caught.name, folder)
    proxy = nodes.proxies[caught.name]
    tasks = proxy.saw(DOWN, m.Assignment)
    first = next(task.session for task in tasks if task.step == STEP)
    assert any(stale.over and stale.session == first for stale in proxy.saw(DOWN, m.Stale)), "it was not refused"
    assert any(task.session != first and task.step > STEP for task in tasks), "it took no part again"
    assert sha(folder) == expected


def test_a_worker_that_does_nothing_while_its_supervisor_sends_heartbeats_is_restarted(
    nodes: FaultNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    expected = undisturbed("kto")
    nodes.ready("a", "b", "c")
    caught = stopped(nodes, "worker")
    config = config_of(model, folder, "kto", timing=replace(CALM, progress_seconds=SHORT.progress_seconds))
    assert train(config, nodes.port) == 0
    lines = [line for line in told(folder).splitlines() if line.startswith(f"{caught.name} connecting it did nothing ")]
    assert any(" s; its worker is restarted; leaves [" in line and line.endswith(OTHERS) for line in lines)
    assert sha(folder) == expected


def test_late_leaves_are_computed_by_another_node_too_and_the_first_result_counts(
    nodes: FaultNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    expected = undisturbed("kto")
    nodes.ready("a", "b", "c")

    def stop(name: str, _: Seen) -> None:
        proxy = nodes.proxies[name]
        nodes.stop(name, "worker")
        proxy.when(DOWN, a(m.Cancel), lambda _: nodes.go_on(name))
        proxy.when(UP, a(m.Cancel), lambda _: again.set())

    caught = nodes.catch(DOWN, given_a_gradient, stop)
    again = nodes.leave_the_rest_to(lambda: caught.name, STEP + 1)
    assert train(config_of(model, folder, "kto", timing=replace(CALM, copy_factor=SHORT.copy_factor)), nodes.port) == 0
    assert f"{caught.name} busy leaves [" in told(folder)
    assert sha(folder) == expected


def assert_given_up(name: str, folder: Path) -> None:
    """Asserts that the run says which node was given up, why, and what was done with its work."""
    lines = [line for line in told(folder).splitlines() if line.startswith(f"{name} dead not heard for ")]
    assert any("; leaves [" in line and line.endswith(OTHERS) for line in lines), told(folder)
