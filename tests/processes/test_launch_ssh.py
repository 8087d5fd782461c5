"""`mlxdist launch --hosts` over a real sshd: the bits of one machine, lost nodes, nothing that is left behind."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxdist.coordinator.config.hosts import local_hosts
from mlxdist.coordinator.config.load import load_config
from mlxdist.coordinator.run import run
from tests.processes.ssh_server import ssh_server, why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.skipif(bool(why_not()), reason=why_not())]

ROOT = Path(__file__).parents[2]
STEPS = 20
PLAIN: dict[str, Any] = {"resume": False, "environ": {}}
RUN = """
model = "{model}"
output = "{output}"
data = "data"
[batch]
size = 8
max_length = 64
[train]
steps = {steps}
[timing]
stop_seconds = 2
away_seconds = 3
restart_seconds = 0.5
"""
HOSTS = """
run = "run.toml"
[defaults]
python = "{python}"
workdir = "~/work folder"
ssh_options = ["-F", "{config}"]
[[nodes]]
host = "mini-1"
[[nodes]]
host = "mini-2"
transport = "ssh"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Path]:
    """A folder with a run.toml, its data, and a hosts.toml of two hosts that one sshd serves."""
    folder = tmp_path_factory.mktemp("launch")
    with ssh_server(folder / "host", aliases="mini-1 mini-2 mini-3") as server:
        rows = [{"text": " ".join(f"w{(i * 7 + j) % 50}" for j in range(12))} for i in range(64)]
        (folder / "data").mkdir()
        (folder / "data" / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (folder / "run.toml").write_text(RUN.format(model=model, output=folder / "out", steps=STEPS))
        python = folder / "python of the host"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        (folder / "hosts.toml").write_text(HOSTS.format(python=python, config=server.config))
        yield folder


def launch(place: Path, output: str, *words: str, hosts: str = "hosts.toml") -> "subprocess.Popen[str]":
    command = [sys.executable, "-u", "-m", "mlxdist", "launch", "--hosts", str(place / hosts)]
    return subprocess.Popen(
        [*command, "--set", f"output={place / output}", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(place)},
        start_new_session=True,
    )


def read_until(process: "subprocess.Popen[str]", pattern: str) -> str:
    """Returns the lines of the launcher, until a line has the pattern."""
    assert process.stdout is not None
    seen = ""
    while line := process.stdout.readline():
        seen += line
        if re.search(pattern, line):
            return seen
    raise AssertionError(f"the launcher ended without {pattern!r}:\n{seen}")


def nodes_of(place: Path) -> list[psutil.Process]:
    """The supervisors and workers on the hosts."""
    found = []
    for process in psutil.process_iter(["environ", "cmdline"]):
        words = " ".join(process.info["cmdline"] or ())
        if (process.info["environ"] or {}).get("HOME") == str(place / "host" / "a home") and "mlxdist" in words:
            found.append(process)
    return found


def all_gone(place: Path, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while nodes_of(place):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def bits(folder: Path) -> str:
    return hashlib.sha256((folder / "adapters.safetensors").read_bytes()).hexdigest()


def test_a_run_over_ssh_has_the_bits_of_one_machine_though_a_connection_is_lost_and_its_launcher_sleeps(
    place: Path,
) -> None:
    """The nodes leave while the launcher and its ssh are stopped, and are started again when they go on."""
    with launch(place, "out") as process:
        said = read_until(process, "step 1 of")
        for name in ("mini-1", "mini-2"):
            assert re.search(rf"{name}  .*  A$", said, re.MULTILINE), said
        carriers = [p for p in psutil.Process(process.pid).children() if "mini-1" in " ".join(p.cmdline())]
        carriers[0].kill()
        asleep = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for each in asleep:
            with suppress(psutil.NoSuchProcess):  # the one that was killed
                each.suspend()
        assert all_gone(place)
        for each in asleep:
            with suppress(psutil.NoSuchProcess):
                each.resume()
        said += read_until(process, "the adapter is in")
        assert process.wait() == 0
    assert re.search("mini-1: .*its supervisor, or ssh, ended with exit code -9", said)
    assert re.search("mini-[12]: ready", said.partition("step 1 of")[2])
    assert all_gone(place)
    config = load_config(place / "run.toml", [f"output={place / 'alone'}"])
    assert run(config, local_hosts(1), **PLAIN) == 0
    assert bits(place / "out") == bits(place / "alone")
    assert (place / "host" / "a home" / "work folder").is_dir()
    log = (place / "out" / "logs" / "mini-2.log").read_text()
    assert "the run is over" in log


def test_two_runs_on_the_same_hosts_do_not_disturb_each_other_and_leave_nothing_behind(place: Path) -> None:
    with launch(place, "first", "--set", "train.steps=100000") as first:
        read_until(first, "step 1 of")
        with launch(place, "second", "--set", "train.steps=2") as second:
            said = read_until(second, "the adapter is in")
            assert second.wait() == 0
        assert re.search(r"mini-1: other runs work there and share its memory: .*\bfirst\b", said)
        assert "dead" not in read_until(first, r"step \d+0 of")
        assert len(nodes_of(place)) >= 4
        first.kill()
    assert all_gone(place)


AWAY = """
run = "run.toml"
[coordinator]
host = "mini-1"
[defaults]
python = "{python}"
ssh_options = ["-F", "{config}"]
[[nodes]]
host = "localhost"
"""


def test_a_run_on_another_coordinator_goes_on_without_its_viewer_and_gives_the_same_adapter(place: Path) -> None:
    python, config = place / "python of the host", place / "host" / "ssh_config"
    (place / "away.toml").write_text(AWAY.format(python=python, config=config))
    with launch(place, "long", "--set", "train.steps=100000", hosts="away.toml") as viewer:
        read_until(viewer, "step 1 of")
        viewer.send_signal(signal.SIGINT)
        assert "the run goes on at mini-1" in read_until(viewer, "--attach")
        assert viewer.wait() == 0
    assert nodes_of(place)
    with launch(place, "long", "--attach", hosts="away.toml") as viewer:
        read_until(viewer, r"step \d+ of")
        with launch(place, "long", "--stop", hosts="away.toml") as stopping:
            read_until(stopping, "the run was ended at mini-1")
        read_until(viewer, "interrupted after step")
        assert viewer.wait() == 130
    assert all_gone(place)
    with launch(place, "short", "--set", "train.steps=3", hosts="away.toml") as viewer:
        read_until(viewer, "results were copied")
        assert viewer.wait() == 0
    alone = load_config(place / "run.toml", [f"output={place / 'here'}", "train.steps=3"])
    assert run(alone, local_hosts(1), **PLAIN) == 0
    assert bits(place / "short") == bits(place / "here")
