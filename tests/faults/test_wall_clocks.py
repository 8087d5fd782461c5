"""Wall clocks that are set by hours, on the coordinator and on a node, lose no node and change no bit and no schedule.

Only the wall clock jumps here, as when a person or the network sets it; test_faults_clocks.py has the other one.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from mlxdist.coordinator.config.schema import TrainConfig
from mlxdist.coordinator.training.schedule import step_learning_rate
from scripts.local_cluster import free_ports
from tests.faults.fault_runs import data_folder, events, sha, told
from tests.faults.wall_clock import WallClock, library
from tests.processes.node_pools import start_node

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

HOURS, STEPS = 8.0, 15
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


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, WallClock], int]]:
    """A clock for each process, and the port that two nodes call, which serve all tests."""
    if not library():
        pytest.skip("a wall clock for one process needs libfaketime (Debian's package, installed as root)")
    folder, port = tmp_path_factory.mktemp("clocks"), free_ports()
    clocks = {name: WallClock.new(folder / f"clock-{name}") for name in ("coordinator", "a", "b")}
    nodes = [start_node(port, name, folder, environment=clocks[name].environment) for name in ("a", "b")]
    try:
        yield clocks, port
    finally:
        for node in nodes:
            node.kill()
            node.wait()


@pytest.fixture
def clocks(started: tuple[dict[str, WallClock], int]) -> dict[str, WallClock]:
    """The clocks, which are right."""
    for clock in started[0].values():
        clock.set(0.0)
    return started[0]


@pytest.fixture
def port(started: tuple[dict[str, WallClock], int]) -> int:
    """The port that the nodes call."""
    return started[1]


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
    """Sets these of the clocks of the coordinator and of a node, each forward, then back beyond the right time."""
    step = first
    for name in [name for name in ("coordinator", "b") if name in clocks]:
        for hours in (HOURS, -HOURS):
            run.until(step)
            clocks[name].set(hours)
            step += every
    run.until(step)


def test_wall_clocks_that_are_set_lose_no_node_and_change_no_bit(
    clocks: dict[str, WallClock], port: int, model: Path, tmp_path: Path
) -> None:
    whole = Launched(tmp_path / "whole", port, model, f"steps = {STEPS}", clocks["coordinator"])
    whole.end()
    run = Launched(tmp_path / "set", port, model, f"steps = {STEPS}", clocks["coordinator"])
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
    clocks: dict[str, WallClock], port: int, model: Path, tmp_path: Path
) -> None:
    hours = 12 / 3600
    run = Launched(tmp_path / "hours", port, model, f"max_hours = {hours}", clocks["coordinator"])
    set_all({"coordinator": clocks["coordinator"]}, run, 2, 1)
    run.end()
    steps = events(run.output, "train")
    elapsed = [float(str(step["elapsed_seconds"])) for step in steps]
    assert elapsed == sorted(elapsed)
    assert elapsed[-2] < 3600 * hours <= elapsed[-1] < 3600, "it ended at another time than its own"
    train = TrainConfig(max_hours=hours, learning_rate=1.0, schedule="cosine")
    wanted = [step_learning_rate(train, index + 1, None, before) for index, before in enumerate([0.0, *elapsed[:-1]])]
    found = [float(str(step["learning_rate"])) for step in steps]
    assert [rate / max(found) for rate in found] == pytest.approx([rate / max(wanted) for rate in wanted])
