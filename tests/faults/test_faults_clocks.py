"""Clocks that jump by 8 hours, on a node and on the coordinator, change no bit and lose no node.

The tests simulate a machine that slept while its monotonic clock ran (like Linux's CLOCK_BOOTTIME): they add 8 hours to
the clock of the supervisor or the coordinator. Where that clock stands still, a sleeping node looks like a stopped one
(test_faults_stops.py). No decision depends on the wall clock, so setting it has no effect: it only gives events their
time and the coordinator its incarnation.
"""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mlxdist.protocol import messages as m
from mlxdist.protocol.messages import Message
from mlxdist.protocol.transport import CONTROL
from tests.faults.fault_nodes import FaultNodes, a
from tests.faults.fault_proxy import DOWN, UP, Proxy, Seen
from tests.faults.fault_runs import CALM, Undisturbed, config_of, sha, told, train
from tests.faults.jumping_node import JUMP_SECONDS, JumpingClock

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
PATIENT = replace(CALM, beat_seconds=1.0, return_seconds=60.0)  # a loaded machine must not look like a lost node
STEP = 3  # of the jump: by then all nodes work


def given_a_gradient(_: str, message: Message) -> bool:
    return isinstance(message, m.Assignment) and message.verb == "gradient" and message.step == STEP


def test_a_coordinator_whose_clock_jumps_gives_no_node_up(
    nodes: FaultNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    expected = undisturbed("kto")
    nodes.ready("a", "b", "c")
    clock = JumpingClock()
    caught = nodes.catch(DOWN, given_a_gradient, lambda *_: clock.jump())
    assert train(config_of(model, folder, "kto", timing=PATIENT), nodes.port, clock=clock) == 0
    assert caught.done.is_set()
    assert f"run says the coordinator did nothing for {JUMP_SECONDS:.3g} s" in told(folder)
    for loss in (" dead ", " suspect ", "go to others", "restarted", "take long there"):
        assert loss not in told(folder)
    assert sha(folder) == expected


def test_a_node_whose_clock_jumps_stays_and_continues_to_work(
    nodes: FaultNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    expected = undisturbed("kto")
    if "jumping" not in nodes.processes:
        proxy = nodes.proxies["jumping"] = Proxy(nodes.port).start()
        command = [sys.executable, "-m", "tests.faults.jumping_node", "jumping", str(proxy.ports[CONTROL])]
        with (nodes.logs / "jumping.txt").open("wb") as log:
            nodes.processes["jumping"] = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    nodes.ready("a", "jumping")
    proxy = nodes.proxies["jumping"]
    again = nodes.leave_the_rest_to(lambda: "jumping", STEP)

    def jump(_: Seen) -> None:
        beats = len(proxy.saw(UP, m.Heartbeat))
        nodes.supervisor("jumping").send_signal(signal.SIGUSR1)
        proxy.when(
            UP, lambda message: isinstance(message, m.Heartbeat) and len(proxy.saw(UP, m.Heartbeat)) > beats + 2, back
        )

    def back(_: Seen) -> None:
        """Waits for more heartbeats, so that the node has read its clock again."""
        again.set()

    nodes.catch(DOWN, lambda _, message: a(m.Assignment, step=STEP - 1)(message), lambda _, seen: jump(seen))
    assert train(config_of(model, folder, "kto", timing=PATIENT), nodes.port) == 0
    assert nodes.processes["jumping"].poll() is None, (nodes.logs / "jumping.txt").read_text()
    sessions = {task.session for task in proxy.saw(DOWN, m.Assignment)}
    assert len(sessions) == 1, "it was another worker, or another session, that went on"
    assert any(task.step > STEP for task in proxy.saw(DOWN, m.Assignment))
    assert sha(folder) == expected
