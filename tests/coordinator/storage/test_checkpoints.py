"""Checkpoints appear whole and disappear whole, and the best one never goes."""

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxdist.coordinator.storage.checkpoints import (
    best_checkpoint,
    checkpoint_name,
    link_best,
    list_checkpoints,
    prune_checkpoints,
    save_checkpoint,
)
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.protocol.errors import SaveError


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def put(text: str = "x") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "adapters.safetensors").write_text(text)

    return write


def save(run: RunFolder, step: int, val_loss: float | None = None, text: str = "x") -> Path:
    return save_checkpoint(run, step, val_loss, put(text))


def names(run: RunFolder) -> list[str]:
    return [checkpoint.path.name for checkpoint in list_checkpoints(run)]


@pytest.mark.parametrize(
    ("step", "val_loss", "name"),
    [
        (50, 1.23454, "step-00050-val1.2345"),
        (50, None, "step-00050"),
        (123456, 0.0, "step-123456-val0.0000"),
        (1, math.nan, "step-00001-valnan"),
    ],
)
def test_a_checkpoint_is_named_by_step_and_validation_loss(step: int, val_loss: float | None, name: str) -> None:
    assert checkpoint_name(step, val_loss) == name


def test_checkpoints_are_listed_by_step_whatever_their_names(run: RunFolder) -> None:
    for step, val_loss in [(100000, 1.0), (99999, math.nan), (5, None), (7, -0.25)]:
        save(run, step, val_loss)
    assert [checkpoint.step for checkpoint in list_checkpoints(run)] == [5, 7, 99999, 100000]


def test_a_crash_while_saving_leaves_no_checkpoint_and_the_old_ones(run: RunFolder) -> None:
    save(run, 1)

    def dies(folder: Path) -> None:
        put("half")(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(SaveError, match="disk is full"):
        save_checkpoint(run, 2, 1.0, dies)
    assert os.listdir(run.checkpoints) == ["step-00001"]


def test_best_is_a_relative_link_that_moves(run: RunFolder) -> None:
    for step in (1, 2):
        link_best(run, save(run, step, 1.0 / step))
        assert os.readlink(run.checkpoints / "best") == checkpoint_name(step, 1.0 / step)
    moved = run.path.rename(run.path.with_name("moved"))
    assert (moved / "checkpoints" / "best" / "adapters.safetensors").read_text() == "x"


def test_pruning_keeps_the_newest_and_the_best(run: RunFolder) -> None:
    for step in range(1, 7):
        save(run, step)
    link_best(run, run.checkpoints / "step-00002")
    assert prune_checkpoints(run, "all") == ()
    gone = prune_checkpoints(run, 2)
    assert [path.name for path in gone] == ["step-00001", "step-00003", "step-00004"]
    assert names(run) == ["step-00002", "step-00005", "step-00006"]
    assert prune_checkpoints(run, 2) == ()
    assert prune_checkpoints(run, 10) == ()
    assert sorted(os.listdir(run.checkpoints)) == ["best", *names(run)]


def test_a_step_done_again_after_resuming_has_one_checkpoint_and_best_follows(run: RunFolder) -> None:
    link_best(run, save(run, 50, 1.5))
    again = save(run, 50, 1.5, "again")
    assert (again / "adapters.safetensors").read_text() == "again"
    different = save(run, 50, 1.25)
    assert names(run) == ["step-00050-val1.2500"]
    assert best_checkpoint(run) == different


def test_a_link_to_a_checkpoint_that_is_gone_is_no_best(run: RunFolder) -> None:
    assert best_checkpoint(run) is None
    assert list_checkpoints(run) == ()
    save(run, 1)
    link_best(run, run.checkpoints / "step-00009")
    assert best_checkpoint(run) is None
