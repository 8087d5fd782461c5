"""A run that another Mac coordinates: its hosts file, its folder, its log."""

import os
import subprocess
import sys
from pathlib import Path

from mlxdist.coordinator.config.hosts import CoordinatorHost, Hosts, NodeSpec, load_hosts
from mlxdist.coordinator.launch.detached import ERRORS, EXIT, LOG, NOTHING, PID, running
from mlxdist.coordinator.launch.elsewhere import elsewhere, own_hosts

TEXT = """\
run = "other folder/run.toml"   # [coordinator]

[coordinator]
host = "mini-1"   # a Mac
port = 5555

[defaults]
ssh_options = [
  "-F", "x",
]

[[nodes]]
host = "mini-1"
[[nodes]]
host = "mini-2"
"""


def detached(verb: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """The lines that a verb gives, as a person who keeps the terminal open sees them."""
    command = [sys.executable, "-m", "mlxdist.coordinator.launch.detached", verb, str(folder)]
    reader, writer = os.pipe()  # standard input that stays open
    try:
        return subprocess.run(command, stdin=reader, capture_output=True, text=True, timeout=60, check=False)
    finally:
        os.close(reader)
        os.close(writer)


def test_the_hosts_file_that_is_sent_is_that_of_the_coordinator_itself(tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_text(own_hosts(TEXT))
    hosts = load_hosts(tmp_path / "hosts.toml")
    assert hosts.run is None
    assert hosts.coordinator == CoordinatorHost(port=5555)
    assert [(node.host, node.ssh_options) for node in hosts.nodes] == [
        (name, ("-F", "x")) for name in ("mini-1", "mini-2")
    ]


def test_the_coordinator_is_reached_as_its_node_is_and_else_as_the_first_node() -> None:
    first = NodeSpec(name="a", host="a", user="ada", workdir="/w")
    named = NodeSpec(name="c", host="mini", user="bob", workdir="/x")
    place = elsewhere(Hosts(None, CoordinatorHost(host="mini"), (first, named)), "pairs")
    assert (place.node.user, place.folder) == ("bob", "/x/runs/pairs")
    place = elsewhere(Hosts(None, CoordinatorHost(host="mini"), (first,)), "pairs")
    assert (place.node.host, place.node.user, place.folder) == ("mini", "ada", "/w/runs/pairs")
    assert elsewhere(Hosts(None, CoordinatorHost(host="mini"), ()), "pairs").folder == "~/mlxdist/runs/pairs"


def test_a_run_that_has_ended_gives_its_exit_code_and_its_errors(tmp_path: Path) -> None:
    (tmp_path / LOG).write_text("what is shown from its events\n")
    (tmp_path / ERRORS).write_text("mlxdist: no such file\n")
    (tmp_path / EXIT).write_text("2\n")
    done = detached("result", tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("", "mlxdist: no such file\n", 2)


def test_a_run_that_was_killed_is_told_with_the_way_to_go_on(tmp_path: Path) -> None:
    (tmp_path / LOG).write_text("first\n")
    (tmp_path / PID).write_text(f"{os.getpid()}\n")  # used again by another program
    done = detached("result", tmp_path)
    assert done.returncode == NOTHING
    assert "--resume continues it" in done.stderr
    assert running(tmp_path) is None


def test_what_was_never_started_is_neither_shown_nor_stopped(tmp_path: Path) -> None:
    for verb in ("result", "stop"):
        done = detached(verb, tmp_path)
        assert done.returncode == NOTHING
        assert "no run" in done.stderr
