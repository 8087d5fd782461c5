"""A coordinator that is killed again and again produces the undisturbed run; its nodes keep their model."""

import hashlib
import json
import random
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.faults.fault_runs import data_folder, events, sha
from tests.faults.forked_coordinator import Coordinator, Coordinators

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

KILLS = 20
RUN = """
model = "{model}"
method = "kto"
data = "{data}"
output = "{output}"
[batch]
size = 6
[lora]
rank = 4
[train]
steps = 40
learning_rate = 3e-2
eval_every = 2
early_stop_evals = 3
save_every = 1
keep_checkpoints = 5
[timing]
beat_seconds = 0.1
"""
TIMED = ("time", "wall_seconds", "seconds", "tokens_per_second", "all_tokens_per_second", "peak_gb", "message")
TIMED += ("elapsed_seconds", "disturbed", "leaves_recomputed", "seconds_paused")  # and the cost of losses


def write_run(folder: Path, model: Path, output: Path) -> Path:
    """Writes the run file of one run, over data that all runs in `folder` share."""
    data = folder / "data"
    if not data.exists():
        rows = (data_folder(data, "kto") / "train.jsonl").read_text().splitlines(keepends=True)
        (data / "valid.jsonl").write_text("".join(rows[:6]))
        (data / "train.jsonl").write_text("".join(rows[6:]))
    path = folder / f"{output.name}.toml"
    path.write_text(RUN.format(model=model, data=data, output=output))
    return path


def lines_of(output: Path, kind: str) -> list[dict[str, object]]:
    """The events of one kind, without the fields that differ from one run to the next."""
    return [{key: value for key, value in event.items() if key not in TIMED} for event in events(output, kind)]


def files_of(folder: Path) -> dict[str, str]:
    """The files of every checkpoint with their hashes, and the target of `best`."""
    found = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return found | {"best": str((folder / "best").readlink())}


def wait_for_steps(coordinator: Coordinator, output: Path, steps: int) -> None:
    """Waits until the event file has so many steps, or the coordinator has ended."""
    while coordinator.code is None and len(events(output, "train")) < steps:
        time.sleep(0.005)


def test_a_run_whose_coordinator_is_killed_twenty_times_equals_the_undisturbed_run(
    launcher: Coordinators, model: Path, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    undisturbed = launcher.start(write_run(tmp_path, model, whole))
    assert undisturbed.wait() == 0, undisturbed.said.read_text()
    workers = {name: launcher.nodes.worker(name).pid for name in ("a", "b")}
    run, chance, kills, starts = write_run(tmp_path, model, killed), random.Random(6), 0, 0
    while kills < KILLS:
        starts += 1
        assert starts < 3 * KILLS, "hardly any coordinator ran long enough to be killed"
        done = len(events(killed, "train"))
        coordinator = launcher.start(run, resume=(killed / "manifest.json").exists())
        if chance.random() < 0.4:  # while it starts
            time.sleep(chance.uniform(0.0, 0.6))
        else:  # within a step, an evaluation, or a save
            wait_for_steps(coordinator, killed, done + chance.randint(1, 2))
            time.sleep(chance.uniform(0.0, 0.1))
        ended = coordinator.code
        assert ended in (None, 0), coordinator.said.read_text()
        kills += ended is None
        coordinator.kill()
    last = launcher.start(run, resume=True)
    assert last.wait() == 0, last.said.read_text()

    assert sha(killed) == sha(whole)
    for kind in ("train", "val", "checkpoint"):
        assert lines_of(killed, kind) == lines_of(whole, kind)
    assert [event["step"] for event in events(killed, "train")] == [*range(1, len(events(whole, "train")) + 1)]
    assert len(events(whole, "train")) < 40, "the run was to stop early"
    assert len(events(killed, "done")) == 1
    assert files_of(killed / "checkpoints") == files_of(whole / "checkpoints")
    summaries = [json.loads((output / "metrics.json").read_text()) for output in (killed, whole)]
    for key in ("status", "steps", "train_losses", "val_trajectory", "best_val", "checkpoints", "final_val_loss"):
        assert summaries[0][key] == summaries[1][key]
    states = [load_file(output / "state/resume.safetensors") for output in (killed, whole)]
    assert states[0].keys() == states[1].keys()
    assert all(np.array_equal(states[0][name], states[1][name], equal_nan=True) for name in states[0])
    assert not [path for path in killed.rglob(".*.aside")]

    # The nodes started by hand kept running and loaded the model once.
    assert {name: launcher.nodes.worker(name).pid for name in ("a", "b")} == workers
    for name in ("a", "b"):
        told = [event["message"] for event in events(killed, "node") if event["name"] == name]
        assert "the model is still loaded" in told
        assert "hashing the model's files" not in told
