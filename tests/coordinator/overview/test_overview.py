"""The list of runs and the comparison of two, from folders as runs leave them."""

import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mlxdist.coordinator.overview.compare import compare
from mlxdist.coordinator.overview.find import FoundRun, run_in, runs_below
from mlxdist.coordinator.overview.show import show_comparison, show_runs
from mlxdist.coordinator.report.reporter import Reporter
from mlxdist.coordinator.storage.open_run import open_run
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.protocol.errors import UserError
from tests.coordinator.overview.told_runs import NoDisplay, make_run


def found(path: Path) -> FoundRun:
    run = run_in(path)
    assert run is not None
    return run


def test_runs_are_found_at_any_depth_oldest_first_and_nothing_else_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "a" / "late", minute=9)
    make_run(tmp_path / "b [red]", minute=3, steps=3, ending="interrupted")
    make_run(tmp_path / "a" / "late" / "copy")  # below a run nothing is searched
    make_run(tmp_path / ".hidden")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text("{}")
    make_run(tmp_path / "other" / "deep", minute=5, steps=1, ending=None)
    assert [run.path.name for run in runs_below(tmp_path)] == ["b [red]", "deep", "late"]

    show_runs(tmp_path, json=False)
    shown = capsys.readouterr().out.splitlines()
    assert "b [red]" in shown[1]
    assert [word in shown[3] for word in ("a/late", "sft", "tiny", "4 of 8", "1.0000 at step 4", "done")] == [True] * 6
    show_runs(tmp_path, json=True)
    facts = json.loads(capsys.readouterr().out)
    assert [(each["run"], each["steps"], each["best_validation"], each["state"]) for each in facts] == [
        ("b [red]", 3, 2.0, "interrupted"),
        ("other/deep", 1, None, "training"),
        ("a/late", 4, 1.0, "done"),
    ]


def test_a_run_is_training_while_its_coordinator_holds_it(tmp_path: Path) -> None:
    """A process id of the past says nothing, also when another program has it now."""
    path = make_run(tmp_path / "run", ending=None)
    assert found(path).state == "training"  # this process wrote the lock, and is still there
    lock = RunFolder(path).state / "lock"
    os.utime(lock, (0, 0))
    assert found(path).state == "stopped"
    lock.write_text("not a number")
    assert found(path).state == "stopped"
    lock.write_text(f"{2**22 + 5}\n")  # above the highest process id
    assert found(path).state == "stopped"
    lock.unlink()
    assert found(path).state == "stopped"


def test_a_run_that_was_resumed_after_its_end_has_not_ended(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    assert found(path).state == "done"
    with open_run(path, resume=True, base_model="org/tiny", method="sft", created_at=datetime.now(UTC)) as run:
        Reporter(run, NoDisplay(), clock=time.monotonic).resume_after(2)  # type: ignore[arg-type]
        assert found(path).state == "training"
    os.utime(RunFolder(path).state / "lock", (0, 0))
    assert (found(path).state, found(path).steps) == ("stopped", 2)


def test_a_comparison_has_the_settings_that_differ_and_the_last_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = make_run(tmp_path / "x" / "run"), make_run(tmp_path / "y" / "run", steps=5, rate=2e-3)
    comparison = compare(one, other)
    assert comparison.settings == {"train.learning_rate": (1e-3, 2e-3)}
    assert comparison.values["train loss"] == (0.75, 0.6)
    assert comparison.values["steps"] == (4, 5)
    assert comparison.values["validation step"] == (4, 4)
    assert comparison.values["best validation loss"] == (1.0, 1.0)
    show_comparison(one, other, json=False)
    shown = capsys.readouterr().out
    assert "x/run" in shown
    assert "y/run" in shown
    show_comparison(one, one, json=True)
    assert json.loads(capsys.readouterr().out)["settings"] == {}


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_runs(tmp_path, json=False)
    assert "There is no run below" in capsys.readouterr().out
    with pytest.raises(UserError, match="is not a folder"):
        show_runs(tmp_path / "nowhere", json=False)
    with pytest.raises(UserError, match="holds no run"):
        show_comparison(tmp_path, tmp_path, json=False)
