"""Real nodes that were admitted and are wrong, or of another bit class: the bits stay, or it is said from where not."""

import json
import os
import platform
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from mlxdist.coordinator.config.hosts import CoordinatorHost, Hosts
from mlxdist.coordinator.run import run
from mlxdist.protocol import messages as m
from mlxdist.protocol.transport import CONTROL
from tests.faults.fault_nodes import FaultNodes, a
from tests.faults.fault_proxy import DOWN, Proxy, Seen, wait_for
from tests.faults.fault_runs import CALM, Script, Undisturbed, config_of, events, sha, told, train
from tests.faults.hostile_worker import COUNT, LIES
from tests.processes.node_pools import start_node

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEP = 3  # in which a node of another class joins
OTHER_KERNELS = {"OPENBLAS_CORETYPE": "Nehalem"}  # OpenBLAS then adds in another order
needs_openblas = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="another bit class is made with OPENBLAS_CORETYPE, for x86_64 Linux",
)


def hostile(nodes: FaultNodes, name: str, folder: Path, *lies: str) -> None:
    """Starts a node whose workers give these wrong answers, one worker after the other."""
    environment = {**os.environ, "MLX_DISABLE_COMPILE": "1", LIES: ",".join(lies), COUNT: str(folder / "count")}
    nodes.processes[name] = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.hostile_node", name, str(nodes.port)],
        stdin=subprocess.DEVNULL,
        env=environment,
    )


def test_a_node_whose_workers_lie_in_every_way_is_put_out_and_the_run_has_the_bits_of_an_undisturbed_one(
    nodes: FaultNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    folder, name = tmp_path / "run", "liar"
    expected = undisturbed("kto")
    nodes.ready("a", later=("b",))
    hostile(nodes, name, tmp_path, "nan", "shape", "hash", "endless")
    config = config_of(model, folder, "kto", timing=replace(CALM, progress_seconds=3.0))
    # Two nodes are needed, so that the run waits for each next worker of the liar, and at last for another node.
    with Script(folder, (lambda: f"{name} left", nodes.proxies["b"].online)):
        assert train(config, nodes.port, min_nodes=2) == 0
    assert sha(folder) == expected
    said = [str(event["message"]) for event in events(folder, "node") if event["name"] == name]
    restarts = [message for message in said if "; its worker is restarted" in message]
    causes = [
        r"NaN or Inf in (leaf|leaves) .*of step \d.*, which it did not say",
        r"it sent what makes no sense: the answer to leaf \d has \d+ bytes in \d columns for \d+ rows",
        r"it sent what makes no sense: 3 vectors in a row arrived damaged",
    ]
    assert len(restarts) == 3, said
    for cause, message in zip(causes, restarts, strict=True):
        assert re.match(cause, message), message
    (out,) = [message for message in said if message.startswith("turned away")]
    assert "its partial did not come for" in out
    assert nodes.processes[name].wait(30) == 1


def other_class(nodes: FaultNodes, name: str) -> None:
    """Starts a node with other kernels, which stays offline for now."""
    if name not in nodes.proxies:
        nodes.proxies[name] = Proxy(nodes.port).start()
        nodes.proxies[name].offline()
        port = nodes.proxies[name].ports[CONTROL]
        nodes.processes[name] = start_node(port, name, nodes.logs, environment=OTHER_KERNELS)


def promised(folder: Path) -> dict[str, object]:
    config = json.loads((folder / "config.json").read_text())
    return {key: config[key] for key in ("promise", "promise_from_step", "promise_reason", "promises")}


def joins_in_step(nodes: FaultNodes, late: str, step: int) -> threading.Event:
    """Lets a node join while node a has no work of this step yet; its work goes on at the event."""
    go_on = threading.Event()

    def hold(_: Seen) -> None:
        nodes.proxies[late].online()
        wait_for(go_on, f"{late} to be ready")

    nodes.proxies["a"].when(DOWN, a(m.Assignment, step=step), hold)
    return go_on


@needs_openblas
def test_a_late_node_of_another_class_waits_as_a_spare_and_the_bits_stay(
    nodes: FaultNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    expected = undisturbed("sft")
    nodes.ready("a")
    other_class(nodes, "odd")
    go_on = joins_in_step(nodes, "odd", STEP)
    with Script(folder, (lambda: "odd ready", go_on.set)):
        assert train(config_of(model, folder, "sft"), nodes.port) == 0
    assert "odd ready it computes a test batch with other last bits" in told(folder)
    assert nodes.proxies["odd"].saw(DOWN, m.Assignment) == []
    assert sha(folder) == expected
    assert promised(folder)["promise"] == "same bits"
    assert [event["promise"] for event in events(folder, "promise")] == ["same bits"]


@needs_openblas
def test_a_run_that_is_resumed_on_another_class_says_from_which_step_its_bits_are_others(
    nodes: FaultNodes, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    nodes.ready("a")
    other_class(nodes, "odd")
    assert train(config_of(model, folder, "sft", steps=2), nodes.port) == 0
    nodes.proxies["a"].offline()
    nodes.proxies["odd"].online()
    hosts = Hosts(None, CoordinatorHost(port=nodes.port), ())
    assert run(config_of(model, folder, "sft", steps=4), hosts, resume=True, environ={"MLXDIST_PLAIN": "1"}) == 0
    found = promised(folder)
    assert (found["promise"], found["promise_from_step"]) == ("tolerance", 3)
    assert found["promise_reason"] == "the run was resumed on odd, with other last bits than those of the nodes before"
    assert [(event["promise"], event["step"]) for event in events(folder, "promise")] == [
        ("same bits", 1),
        ("tolerance", 3),
    ]


@needs_openblas
@pytest.mark.parametrize("how", ["spare", "allow"])
def test_a_promise_that_cannot_be_kept_ends_with_an_event_a_line_and_config_json(
    how: str,
    nodes: FaultNodes,
    undisturbed: Undisturbed,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    expected = undisturbed("sft")
    nodes.ready("a")
    other_class(nodes, "odd")
    go_on = joins_in_step(nodes, "odd", STEP)

    def leave() -> None:
        if how == "spare":
            nodes.kill("a", "both")  # the last node of the class
        go_on.set()

    config = config_of(model, folder, "sft", timing=replace(CALM, suspect_seconds=1.0, dead_seconds=2.0))
    hosts = Hosts(None, CoordinatorHost(port=nodes.port, mixed=how), ())  # type: ignore[arg-type]
    with Script(folder, (lambda: "odd ready", leave)):
        assert run(config, hosts, resume=False, environ={"MLXDIST_PLAIN": "1"}) == 0
    found = promised(folder)
    first, second = events(folder, "promise")
    assert (first["promise"], first["step"], second["promise"]) == ("same bits", 1, "tolerance")
    assert second["step"] == found["promise_from_step"]
    assert int(str(second["step"])) >= STEP
    assert found["promise"] == "tolerance"
    assert str(second["message"]) in capsys.readouterr().out
    words = 'coordinator.mixed = "allow" uses it' if how == "allow" else "too few of these were left"
    assert words in str(found["promise_reason"])
    assert [each["kind"] for each in found["promises"]] == ["same bits", "tolerance"]  # type: ignore[attr-defined]
    assert sha(folder) != expected
