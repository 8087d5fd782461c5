"""Everything that grows is bounded: logs, waiting lines, open files. The run says what was left out."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mlxdist.coordinator.config.hosts import local_hosts
from mlxdist.coordinator.launch.roster import Roster
from mlxdist.coordinator.launch.starts import starts_of
from mlxdist.coordinator.launch.supervisors import Supervisors
from mlxdist.coordinator.storage.node_log import append_line
from mlxdist.node.process import LINE_CHARS, UNSEEN_LINES, Worker
from mlxdist.node.supervisor import Supervisor
from mlxdist.protocol import messages as m
from mlxdist.protocol.transport import CONTROL
from mlxdist.protocol.wire import decode
from scripts.local_cluster import free_ports
from tests.memory_nodes import Wire
from tests.processes.thread_nodes import HERE

# ---- logs


def test_a_log_never_grows_beyond_its_size_and_keeps_the_newest_lines_whole(tmp_path: Path) -> None:
    log, most = tmp_path / "a.log", 2000
    for number in range(1000):
        append_line(log, f"line {number} of a worker that fails again and again", most)
        assert log.stat().st_size <= most
        lines = log.read_text().splitlines()
        assert lines[-1] == f"line {number} of a worker that fails again and again"
        first = number - len(lines) + 1
        if lines[0].startswith("["):
            assert [line.split()[1] for line in lines[1:]] == [str(kept) for kept in range(first + 1, number + 1)]
            assert "earlier lines were dropped" in lines[0]
            assert sum("dropped" in line for line in lines) == 1
        else:
            assert first == 0


def test_a_supervisor_that_has_the_log_open_continues_at_its_end(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    with log.open("ab", buffering=0) as supervisor:
        for number in range(100):
            append_line(log, f"worker {number}", 500)
        supervisor.write(b"mlxdist node: the run is over\n")
    lines = log.read_text().splitlines()
    assert lines[-2:] == ["worker 99", "mlxdist node: the run is over"]
    assert "\0" not in log.read_text()


def test_a_line_longer_than_the_log_is_still_one_line(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    append_line(log, "x" * 5000, 1000)
    append_line(log, "the next one", 1000)
    assert log.read_text().splitlines()[-1] == "the next one"
    assert log.stat().st_size <= 1000


# ---- the supervisor's lines


@pytest.fixture
def worker() -> Iterator[Worker]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True)
    worker = Worker(process)
    yield worker
    worker.stop()


def all_news(worker: Worker) -> list[str]:
    lines: list[str] = []
    while part := worker.take_lines():
        lines += part
    return lines


def test_waiting_lines_are_bounded_and_the_number_left_out_is_reported_once(worker: Worker) -> None:
    for number in range(UNSEEN_LINES + 4000):
        worker.printed(f"line {number}")
    first, *lines = all_news(worker)
    assert first == "[4000 lines were left out here: the worker printed more than could be sent]"
    assert lines == [f"line {number}" for number in range(4000, UNSEEN_LINES + 4000)]
    worker.printed("the next")
    assert all_news(worker) == ["the next"]


def test_a_line_without_an_end_is_cut() -> None:
    worker = Worker.start({}, ("-c", f"print('x' * {3 * LINE_CHARS}); print('end'); input()"))
    try:
        lines: list[str] = []
        while "end" not in lines:
            lines += worker.take_lines()
        assert [len(line) for line in lines] == [*[LINE_CHARS] * 3, 0, 3]
    finally:
        worker.stop()


def test_lines_that_could_not_be_sent_are_sent_later(worker: Worker) -> None:
    session, link = m.SessionId("run", 1, "1"), Wire(CONTROL, b"a", closed=True)
    supervisor = Supervisor(
        "a", HERE, link, launched=False, wait_seconds=60, clock=lambda: 0.0, start_worker=lambda _: worker
    )
    supervisor._handle(m.Accept(session, 7001, 2.0, {}, 1.0))
    for number in range(3):
        worker.printed(f"line {number}")
        supervisor._tick()
    link.closed = False
    supervisor._tick()
    logs = [message for message, _ in map(decode, link.up) if isinstance(message, m.Log)]
    assert [line for log in logs for line in log.lines] == ["line 0", "line 1", "line 2"]


# ---- open files

RAISED = """
import atexit, resource, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))
atexit.register(lambda: print("soft limit", resource.getrlimit(resource.RLIMIT_NOFILE)))
sys.argv = ["mlxdist", *{words}]
from mlxdist.cli import main
main()
"""


@pytest.mark.parametrize("words", [["node", "--connect", "127.0.0.1:1", "--wait", "0.1s"], ["launch", "no-such.toml"]])
@pytest.mark.parametrize(("hard", "expected"), [("hard", "4096"), ("1000", "1000")])
def test_the_commands_that_start_raise_the_soft_limit_of_open_files(words: list[str], hard: str, expected: str) -> None:
    command = [sys.executable, "-c", RAISED.format(words=words, hard=hard)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert f"soft limit ({expected}, " in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_fifty_joins_and_leaves_leave_no_file_open(model: Path) -> None:
    """A process of its own counts: the nodes and proxies of other tests open files in this one."""
    command = [sys.executable, "-m", "tests.processes.come_and_go", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert after <= before


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_nodes_that_hang_are_gone_after_the_coordinator_has_stopped_them(tmp_path: Path) -> None:
    """A stopped process ignores the end of its input and SIGTERM; only SIGKILL ends it."""
    nodes = Supervisors("run", stop_seconds=0.2, restart_seconds=1.0)
    hosts = local_hosts(3)
    ports = {CONTROL: free_ports()}
    nodes.start(starts_of(hosts.nodes, Roster(hosts.nodes), hosts.coordinator, ports, None, 300.0))
    hung = [psutil.Process(process.pid) for process in nodes.processes.values()]
    for process in hung[:2]:  # the third one leaves by itself
        process.suspend()
    nodes.stop()
    assert not any(process.is_running() for process in hung)
    assert not nodes.processes
