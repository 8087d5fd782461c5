"""Wall clocks that are set by hours, on the coordinator and on a node, lose no node and change no bit and no schedule.

Only the wall clock jumps here, as when a person or the network sets it; test_faults_clocks.py has the other one.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest

from scripts.local_cluster import free_ports
from tests.faults.fault_runs import data_folder, events, sha, told
from tests.faults.wall_clock import WallClock, library
from tests.processes.node_pools import start_node

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

HOURS, STEPS = 8.0, 16
RUN = """
model = "{model}"
data = "{data}"
[batch]
size = 8
[lora]
rank = 4
[train]
{length}
eval_every = 0
report_every = 1
schedule = "cosine"
[timing]
suspect_seconds = 20.0
dead_seconds = 30.0
data_seconds = 60.0
copy_factor = 1e9
"""


@pytest.fixture
def clocks(tmp_path: Path) -> dict[str, WallClock]:
    """A clock for each process."""
    if not library():
        pytest.skip("a wall clock for one process needs libfaketime (Debian's package, installed as root)")
    return {name: WallClock.new(tmp_path / f"clock-{name}") for name in ("coordinator", "a", "b")}


@pytest.fixture
def nodes(clocks: dict[str, WallClock], tmp_path: Path) -> Iterator[int]:
    """Two nodes with clocks of their own, and the port that they call."""
    port = free_ports()
    started = [start_node(port, name, tmp_path, environment=clocks[name].environment) for name in ("a", "b")]
    try:
        yield port
    finally:
        for node in started:
            node.kill()
            node.wait()


class Launched:
    """A run in a process of its own."""

    def __init__(self, folder: Path, port: int, model: Path, length: str, clock: WallClock) -> None:
        self.folder = folder
        folder.mkdir()
        data_folder(folder / "data", "sft")
        (folder / "run.toml").write_text(RUN.format(model=model, data=folder / "data", length=length))
        (folder / "hosts.toml").write_text(f"nodes = []\n[coordinator]\nport = {port}\nmin_nodes = 2\n")
        self.output = folder / "runs" / "run"
        with (folder / "said.txt").open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mlxdist", "launch", "run.toml", "--hosts", "hosts.toml"],
                cwd=folder,
                stdout=said,
                stderr=said,
                env={**os.environ, "MLXDIST_PLAIN": "1", **clock.environment},
            )

    @property
    def said(self) -> str:
        """Its output."""
        return (self.folder / "said.txt").read_text()

    def until(self, steps: int) -> None:
        """Waits for so many steps."""
        while len(events(self.output, "train")) < steps:
            assert self.process.poll() is None, self.said
            threading.Event().wait(0.02)

    def end(self) -> None:
        """Waits for its end, which is a good one."""
        try:
            assert self.process.wait(120) == 0, self.said
        finally:
            self.process.kill()
            self.process.wait()


def set_all(clocks: dict[str, WallClock], run: Launched, first: int, every: int) -> None:
    """Sets the clocks of the coordinator and of a node, each forward and back beyond the right time."""
    step = first
    for name in ("coordinator", "b"):
        for hours in (HOURS, -HOURS):
            run.until(step)
            clocks[name].set(hours)
            step += every
    run.until(step)


def test_wall_clocks_that_are_set_lose_no_node_and_change_no_bit(
    clocks: dict[str, WallClock], nodes: int, model: Path, tmp_path: Path
) -> None:
    whole = Launched(tmp_path / "whole", nodes, model, f"steps = {STEPS}", clocks["coordinator"])
    whole.end()
    run = Launched(tmp_path / "set", nodes, model, f"steps = {STEPS}", clocks["coordinator"])
    set_all(clocks, run, 2, 3)
    run.end()
    assert sha(run.output) == sha(whole.output)
    news = told(run.output)
    for loss in (" dead ", " suspect ", "go to others", "restarted", "gave no sign"):
        assert loss not in news
    assert "slept for 28800 s, or its clock was set; its nodes have time to return" in news
    times = [datetime.fromisoformat(str(event["time"])) for event in events(run.output, "train")]
    assert (max(times) - min(times)).total_seconds() > 2 * 3600 * HOURS - 600, "the clock was not set"
    walls = [float(str(event["wall_seconds"])) for event in events(run.output, "train")]
    assert walls == sorted(walls)
    assert walls[-1] < 3600


def test_a_schedule_over_hours_does_not_follow_a_wall_clock_that_is_set(
    clocks: dict[str, WallClock], nodes: int, model: Path, tmp_path: Path
) -> None:
    seconds = 12.0
    run = Launched(tmp_path / "hours", nodes, model, f"max_hours = {seconds / 3600}", clocks["coordinator"])
    set_all(clocks, run, 3, 5)
    run.end()
    steps = events(run.output, "train")
    assert float(str(steps[-1]["wall_seconds"])) > seconds, "it ended before its time"
    rates = [float(str(step["learning_rate"])) for step in steps]
    fall = rates[rates.index(max(rates)) :]
    assert fall == sorted(fall, reverse=True)
    assert fall[-1] < 0.5 * fall[0]
    assert all(later > 0.5 * earlier for earlier, later in pairwise(fall)), "it fell at once"
