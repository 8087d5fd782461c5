"""Five signals in every phase of a run: one save, one true last line, exit 130, and no traceback."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.coordinator.training.state import load_state
from tests.faults.fault_runs import data_folder, events

pytestmark = pytest.mark.slow

RUN = """
model = "{model}"
data = "{data}"
output = "run"
[batch]
size = 4
[lora]
rank = 4
[train]
steps = 100000
eval_every = {eval_every}
save_every = {save_every}
report_every = 1
"""
LAST = r"interrupted after step (\d+), saved in .*; add --resume to the same command to go on$"
NOTHING = "interrupted before a step was taken: there is nothing new to save$"


@contextmanager
def started(
    folder: Path, model: Path, *, eval_every: int = 0, save_every: int = 1000
) -> "Iterator[subprocess.Popen[bytes]]":
    """Launches a run with two nodes, which has ended after the block."""
    data = data_folder(folder / "data", "sft")
    if eval_every:
        (data / "valid.jsonl").write_text((data / "train.jsonl").read_text())
    run = RUN.format(model=model, data=data, eval_every=eval_every, save_every=save_every)
    (folder / "run.toml").write_text(run)
    with (folder / "said.txt").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlxdist", "launch", "--nodes", "2"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "MLX_DISABLE_COMPILE": "1"},
        )
    try:
        yield process
    finally:
        process.kill()  # its nodes end by themselves
        process.wait()


def said(folder: Path) -> str:
    return (folder / "said.txt").read_text()


def told(folder: Path) -> str:
    """All that the run has told so far: on the screen, and of its nodes in its file."""
    nodes = events(folder / "run", "node")
    return said(folder) + "".join(f"{event['name']}: {event['message']}\n" for event in nodes)


def wait_for(happened: Callable[[], object], process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)


def five(process: "subprocess.Popen[bytes]", seconds: float) -> int:
    """Sends five signals, the last one a SIGTERM, and returns the exit code."""
    for number in (signal.SIGINT,) * 4 + (signal.SIGTERM,):
        if process.poll() is None:
            process.send_signal(number)
            time.sleep(seconds)
    return process.wait(60)


def check(folder: Path, code: int, last: str) -> None:
    text = said(folder)
    assert code == 130, text
    assert re.search(last, text.rstrip("\n")), text
    assert text.count("interrupted") == 1, text
    for word in ("Traceback", "Error", "zmq", "Exception", "ignored"):
        assert word not in text, text


PHASES: dict[str, str] = {
    "reading": "reading the tokenizer",
    "starting": "starting 2 nodes",
    "connected": "localhost: connected",
    "loading": "localhost: loading the model",
    "getting ready": "checking the backward",
}


@pytest.mark.parametrize("seconds", [0.0, 0.03])
@pytest.mark.parametrize("phase", PHASES)
def test_five_signals_before_a_step_end_with_one_sentence(
    phase: str, seconds: float, model: Path, tmp_path: Path
) -> None:
    with started(tmp_path, model) as process:
        wait_for(lambda: PHASES[phase] in told(tmp_path), process)
        check(tmp_path, five(process, seconds), NOTHING)


@pytest.mark.parametrize("seconds", [0.0, 0.03])
@pytest.mark.parametrize(
    ("phase", "keys"), [("step", {}), ("save", {"save_every": 1}), ("evaluation", {"eval_every": 1})]
)
def test_five_signals_during_the_training_save_the_step_of_the_last_line(
    phase: str, keys: dict[str, int], seconds: float, model: Path, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    with started(tmp_path, model, **keys) as process:
        wait_for(lambda: len(events(run.path, "train")) >= 3, process)
        if phase == "save":
            wait_for((run.state / ".resume.safetensors.aside").exists, process)
        check(tmp_path, five(process, seconds), LAST)
    found = re.search(LAST, said(tmp_path).rstrip("\n"))
    assert found is not None
    step = int(found[1])
    assert load_state(run)[0].step == step
    steps = [event["step"] for event in events(run.path, "train")]
    possible = [list(range(1, step + 1)), list(range(1, step + 2))]  # an interrupt may come after the line of a step,
    assert steps in possible[phase == "evaluation" :]  # before it is whole: then the step is done again
    assert json.loads(run.metrics_json.read_text())["status"] == "interrupted"
    assert [event["status"] for event in events(run.path, "done")] == ["interrupted"]
    assert not list(run.path.rglob(".*.aside"))
