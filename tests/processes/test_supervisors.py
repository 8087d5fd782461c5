"""Nodes over a real sshd end when they must, say why, and never wait for us. The node is a small program here."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mlxdist.coordinator.config.hosts import NodeSpec
from mlxdist.coordinator.fleet.ended import Ended, Printed
from mlxdist.coordinator.launch.supervisors import Start, Supervisors
from mlxdist.protocol.launched import AWAY, LaunchOrder
from tests.processes.ssh_server import Server, ssh_server, why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.skipif(bool(why_not()), reason=why_not())]

PATIENCE = 60.0
OBEDIENT = "cat"  # prints its two lines, and ends with its input
STUBBORN = "trap '' TERM HUP; sleep 98765 & echo started; while :; do sleep 98765; done"
LOUD = "head -c 100000000 /dev/zero | tr '\\0' x | fold -w 99; echo; echo the end"
Program = Callable[[str, str], NodeSpec]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ssh_server(tmp_path_factory.mktemp("host"), aliases="mini-1 mini-2") as server:
        yield server


@pytest.fixture
def program(server: Server, tmp_path: Path) -> Program:
    """A node whose "interpreter" is a shell script."""

    def made(host: str, script: str) -> NodeSpec:
        path = tmp_path / f"program of {host}"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        options = server.target().options
        return NodeSpec(name=host, host=host, python=str(path), workdir="~/work dir", ssh_options=options)

    return made


def start_of(node: NodeSpec, host: str = "10.0.0.1", forwards: tuple[tuple[str, int], ...] = ()) -> Start:
    return Start(node, b"null\n", LaunchOrder(host, 5555), forwards)


def supervisors() -> Supervisors:
    return Supervisors("pairs", stop_seconds=0.5, restart_seconds=0.05)


def events_until(nodes: Supervisors, test: Callable[[Ended | Printed], bool]) -> list[Ended | Printed]:
    """Everything that happens until something passes the test."""
    events: list[Ended | Printed] = []
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        for event in nodes.watch():
            events.append(event)
            if test(event):
                return events
        time.sleep(0.01)
    raise AssertionError(f"it did not happen: {events[-20:]}")


def printed(line: str) -> Callable[[Ended | Printed], bool]:
    return lambda event: isinstance(event, Printed) and line in event.line


def of_run(name: str = "") -> list[psutil.Process]:
    """The processes of all nodes on the host, or of one, without the ssh that carries them."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or ())
        if (words == "sleep 98765" and name != "mini-2") or (
            f"--name {name}" in words and "--tag pairs." in words and Path(words.split()[0]).name != "ssh"
        ):
            found.append(process)
    return found


def all_gone(name: str = "") -> bool:
    deadline = time.monotonic() + PATIENCE
    while of_run(name):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_node_gets_its_lines_and_ends_with_its_input(program: Program) -> None:
    nodes = supervisors()
    nodes.start([start_of(program("mini-1", OBEDIENT))])
    events = events_until(nodes, printed('"host":"10.0.0.1"'))
    assert next(event.line for event in events if isinstance(event, Printed)) == "null"
    nodes.stop()
    assert all_gone()


def test_a_node_that_ignores_its_end_is_killed_with_its_group_and_nothing_else_is(program: Program) -> None:
    nodes, others = supervisors(), supervisors()
    nodes.start([start_of(program("mini-1", STUBBORN))])
    others.start([start_of(program("mini-2", OBEDIENT))])
    events_until(nodes, printed("started"))
    events_until(others, printed("5555"))
    nodes.stop()
    assert all_gone("mini-1")
    assert of_run("mini-2")
    others.stop()
    assert all_gone()


def test_a_hundred_megabytes_of_output_stop_no_one_and_the_end_of_it_is_kept(program: Program) -> None:
    nodes = supervisors()
    nodes.start([start_of(program("mini-1", LOUD))])
    process = nodes.processes["mini-1"]
    assert process.wait(PATIENCE) == 0  # while we look at nothing that it prints
    events = events_until(nodes, lambda event: isinstance(event, Ended))
    lines = [event.line for event in events if isinstance(event, Printed)]
    assert lines[-1] == "the end"
    assert "lines were left out here" in lines[0]
    assert 7_000_000 < sum(map(len, lines)) <= 8 << 20
    nodes.stop()


def test_a_node_whose_connection_is_lost_starts_again_and_the_old_one_is_ended_first(
    program: Program, server: Server
) -> None:
    nodes = supervisors()
    nodes.start([start_of(program("mini-1", STUBBORN))])
    events_until(nodes, printed("started"))
    first = {process.pid for process in of_run()}
    for session in server.sessions():
        if session.name() == "sshd":
            session.send_signal(signal.SIGKILL)
    (ended,) = [e for e in events_until(nodes, lambda e: isinstance(e, Ended)) if isinstance(e, Ended)]
    assert not ended.final
    assert "mini-1: the connection was not made, or was lost" in str(ended.error)
    events_until(nodes, printed("started"))
    assert not first & {process.pid for process in of_run()}
    nodes.stop()
    assert all_gone()


def test_a_host_that_comes_back_gets_its_node_again(program: Program, tmp_path: Path) -> None:
    node = program("mini-1", OBEDIENT)
    nodes = supervisors()
    with ssh_server(tmp_path / "first") as server:
        port, config = server.port, server.config
        lost = NodeSpec(**{**vars(node), "ssh_options": ("-F", str(config))})
        nodes.start([start_of(lost)])
        events_until(nodes, printed("5555"))
    events = events_until(nodes, lambda event: isinstance(event, Ended) and "Remote Login" in str(event.error))
    assert all(not event.final for event in events if isinstance(event, Ended))
    with ssh_server(tmp_path / "second", port=port) as again:
        for name in ("known_hosts", "user_key", "user_key.pub"):
            (tmp_path / "first" / name).write_bytes((again.folder / name).read_bytes())
        events_until(nodes, printed("5555"))
        nodes.stop()
    assert all_gone()


def test_a_host_that_refuses_at_the_start_is_not_waited_for(program: Program, server: Server) -> None:
    node = program("mini-1", "exit 0")
    nodes = supervisors()
    nodes.start([start_of(NodeSpec(**{**vars(node), "python": "/no/such/python"}))])
    events = events_until(nodes, lambda event: isinstance(event, Ended))
    ended = events[-1]
    assert isinstance(ended, Ended)
    assert ended.final
    assert "there is no Python that its user may run at /no/such/python" in str(ended.error)
    nodes.stop()


@pytest.mark.parametrize(("code", "final"), [(0, False), (AWAY, False), (1, True)])
def test_a_node_that_heard_nothing_of_us_is_started_again_and_one_that_was_refused_is_not(
    code: int, final: bool, program: Program
) -> None:
    nodes = supervisors()
    nodes.start([start_of(program("mini-1", f"exit {code}"))])
    ended = events_until(nodes, lambda event: isinstance(event, Ended))[-1]
    assert isinstance(ended, Ended)
    assert ended.final == final
    if not final:
        events_until(nodes, lambda event: isinstance(event, Ended))
    nodes.stop()


def test_a_tunnel_gives_the_node_two_ports_of_its_own_and_none_that_is_open(program: Program) -> None:
    nodes = supervisors()
    nodes.start([start_of(program("mini-1", OBEDIENT), forwards=(("127.0.0.1", 7001), ("127.0.0.1", 7002)))])
    events = events_until(nodes, printed("data_port"))
    line = next(event.line for event in events if isinstance(event, Printed) and "data_port" in event.line)
    assert '"host":"127.0.0.1"' in line
    listening = {c.laddr for c in psutil.net_connections("tcp") if c.status == "LISTEN"}
    ports = [int(part.partition(":")[2].rstrip("}")) for part in line.split(",") if "port" in part]
    assert len(set(ports)) == 2
    assert {address.ip for address in listening if address.port in ports} == {"127.0.0.1"}
    nodes.stop()
    assert all_gone()


def test_a_host_that_allows_no_tunnel_is_told_so(program: Program, tmp_path: Path) -> None:
    node, nodes = program("mini-1", OBEDIENT), supervisors()
    with ssh_server(tmp_path / "host", settings="AllowTcpForwarding no") as server:
        strict = NodeSpec(**{**vars(node), "ssh_options": ("-F", str(server.config))})
        nodes.start([start_of(strict, forwards=(("127.0.0.1", 7001), ("127.0.0.1", 7002)))])
        ended = events_until(nodes, lambda event: isinstance(event, Ended))[-1]
        nodes.stop()
    assert isinstance(ended, Ended)
    assert ended.final
    assert "lets no tunnel through" in str(ended.error)


LAUNCHER = """
import sys, time
from mlxdist.coordinator.config.hosts import NodeSpec
from mlxdist.coordinator.launch.supervisors import Start, Supervisors
from mlxdist.protocol.launched import AWAY, LaunchOrder
nodes = Supervisors("pairs", 1.0, 1.0)
node = NodeSpec(name="mini-1", host="mini-1", python=sys.argv[1], ssh_options=("-F", sys.argv[2]))
nodes.start([Start(node, b"null\\n", LaunchOrder("10.0.0.1", 5555))])
while True:
    print(*nodes.watch(), flush=True)
    time.sleep(0.05)
"""


def test_the_nodes_of_a_launcher_that_is_killed_end(program: Program, server: Server) -> None:
    node = program("mini-1", OBEDIENT)
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, node.python, str(server.config)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert launcher.stdout is not None
    with launcher.stdout:
        while "5555" not in launcher.stdout.readline():
            assert launcher.poll() is None
        assert of_run()
        launcher.kill()
        launcher.wait()
    assert all_gone()
