"""Whenever a save is cut off, what is found afterwards is whole: the old or the new, never a half."""

import hashlib
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from mlxdist.coordinator.storage.adapter_files import load_adapter
from mlxdist.coordinator.storage.checkpoints import best_checkpoint, list_checkpoints
from mlxdist.coordinator.storage.open_run import open_run
from mlxdist.coordinator.storage.run_folder import RunFolder, write_json
from mlxdist.coordinator.training.state import PREVIOUS, load_state
from tests.coordinator.storage.crashing_saves import CUTS, save_step

pytestmark = pytest.mark.slow

LEAST_STAGES = 15
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def crashes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folders that processes have left that crashed in a save; the last one of the stages is a whole save."""
    base = tmp_path_factory.mktemp("crashes") / "base"
    subprocess.run(
        [sys.executable, "-m", "tests.coordinator.storage.crashing_saves", str(base)], check=True, timeout=200
    )
    return sorted(path for path in base.parent.iterdir() if path != base)


def files_of(folder: Path) -> dict[str, str]:
    """Every file but the previous state with its hash, and every link with where it leads."""
    return {
        path.relative_to(folder).as_posix(): str(path.readlink())
        if path.is_symlink()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if (path.is_file() or path.is_symlink()) and path.name not in ("manifest.json", "lock", PREVIOUS)
    }


def step_of(adapter: Path) -> float:
    """The step that an adapter's values stand for; all of them must."""
    values = np.concatenate([tensor.ravel() for tensor in load_adapter(adapter)[0].values()])
    assert len(set(values.tolist())) == 1
    return float(values[0])


def test_processes_died_at_every_stage(crashes: list[Path]) -> None:
    stages = [path for path in crashes if path.name.startswith("stage")]
    assert len(stages) > LEAST_STAGES
    assert len(crashes) == len(stages) + len(CUTS)
    leftovers = {path.name for folder in crashes for path in folder.rglob(".*.aside")}
    assert {".resume.safetensors.aside", ".adapters.safetensors.aside", ".best.aside"} <= leftovers
    assert any(path.stat().st_size > 1300 for folder in crashes for path in folder.rglob(".resume*.aside"))


def test_the_state_is_the_old_or_the_new_one_and_whole(crashes: list[Path]) -> None:
    found = set()
    for folder in crashes:
        state, about = load_state(RunFolder(folder))
        assert set(state.adapter.tolist()) == {float(state.step)}
        assert about["step"] == state.step
        found.add(state.step)
    assert found == {1, 2}


def test_the_previous_state_is_whole_and_never_newer_than_the_last_one(crashes: list[Path]) -> None:
    found = set()
    for folder in crashes:
        last, previous = load_state(RunFolder(folder))[0], load_state(RunFolder(folder), previous=True)[0]
        assert set(previous.adapter.tolist()) == {float(previous.step)}
        found.add((previous.step, last.step))
    assert found == {(0, 1), (1, 1), (1, 2)}  # (1, 1): in the moment before the new state takes its place


def test_every_checkpoint_that_is_listed_is_whole_and_the_best_is_always_there(crashes: list[Path]) -> None:
    for folder in crashes:
        listed = list_checkpoints(RunFolder(folder))
        assert listed, folder.name
        assert all(step_of(checkpoint.path) == checkpoint.step for checkpoint in listed), folder.name
        best = best_checkpoint(RunFolder(folder))
        assert best is not None, folder.name
        assert best in [checkpoint.path for checkpoint in listed], folder.name


def test_the_adapter_of_the_run_is_the_old_or_the_new_one(crashes: list[Path]) -> None:
    assert {step_of(folder) for folder in crashes} == {1.0, 2.0}


def test_the_save_that_was_cut_off_is_done_again_and_leaves_what_a_whole_one_does(crashes: list[Path]) -> None:
    whole = files_of(max(path for path in crashes if path.name.startswith("stage")))
    for folder in crashes:
        write_json(RunFolder(folder).manifest, {"version": 1, "created_at": NOON.isoformat()})
        with open_run(folder, resume=True, base_model="m", method="sft", created_at=NOON):
            assert not list(folder.rglob(".*.aside")), folder.name
            save_step(folder, 2)
        assert files_of(folder) == whole, folder.name
        assert load_state(RunFolder(folder), previous=True)[0].step in (1, 2), folder.name
        assert os.readlink(folder / "checkpoints/best") == "step-00002-val0.5000"
