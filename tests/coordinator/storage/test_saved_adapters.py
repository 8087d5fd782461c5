"""The adapters of a run by name: the best, the last, all, a step."""

import json
from pathlib import Path

import pytest

from mlxdist.coordinator.storage.checkpoints import link_best, save_checkpoint
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.coordinator.storage.saved_adapters import all_adapters, choose_adapter, choose_adapters
from mlxdist.protocol.errors import UserError


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Steps 3, 6 and 9, of which 6 is the best."""
    run = RunFolder(tmp_path / "run")
    for step in (3, 6, 9):
        path = save_checkpoint(run, step, 1.0, lambda folder: put(folder))
        if step == 6:
            link_best(run, path)
    return run


def put(folder: Path) -> None:
    (folder / "adapters.safetensors").write_text("x")


def finish(run: RunFolder, step: int) -> None:
    put(run.path)
    run.metrics_json.write_text(json.dumps({"steps": step}))


def steps(run: RunFolder, *wanted: str) -> list[int | None]:
    return [each.step for each in choose_adapters(run, wanted)]


def test_names_give_each_adapter_once_in_the_order_of_steps(run: RunFolder) -> None:
    assert steps(run) == [6, 9]
    assert steps(run, "all") == [3, 6, 9]
    assert steps(run, "last", "best") == [6, 9]
    assert steps(run, "9,3", "last") == [3, 9]
    assert steps(run, "00003") == [3]
    assert [each.name for each in choose_adapters(run, ["all"])] == ["step 3", "step 6 (best)", "step 9"]


def test_the_final_adapter_is_the_last_one_where_no_checkpoint_has_its_step(run: RunFolder) -> None:
    finish(run, 9)
    assert choose_adapters(run, ["last"])[0].folder.parent == run.checkpoints
    finish(run, 10)
    assert (choose_adapters(run, ["last"])[0].folder, steps(run, "last")) == (run.path, [10])
    finish(run, 5)  # a finished run that was resumed with more steps, and saved step 9 since
    assert steps(run, "last") == [9]


def test_a_run_without_evaluations_has_its_final_adapter(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    put(tmp_path)
    assert [each.name for each in all_adapters(run)] == ["final"]
    assert choose_adapter(run, "").folder == tmp_path


def test_one_adapter_is_the_best_unless_another_is_named(run: RunFolder) -> None:
    assert choose_adapter(run, "").step == 6
    assert choose_adapter(run, "last").step == 9
    assert choose_adapter(run, "3").step == 3


@pytest.mark.parametrize(("wanted", "said"), [("7", "no checkpoint '7'; it has steps 3, 6, 9"), ("first", "'first'")])
def test_an_adapter_that_is_not_there_is_refused_with_those_that_are(run: RunFolder, wanted: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        choose_adapters(run, [wanted])


def test_a_run_that_has_saved_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no adapter yet"):
        choose_adapters(RunFolder(tmp_path), [])
