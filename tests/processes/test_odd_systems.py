"""Systems that are not as usual: closed streams, few open files, odd folders. A run works there, or says why not."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.fault_runs import data_folder, sha

pytestmark = pytest.mark.slow

RUN = """
model = "{model}"
data = "{data}"
[batch]
size = 4
[lora]
rank = 4
[train]
steps = {steps}
eval_every = 0
report_every = 1
"""
Launch = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture
def launch(model: Path, tmp_path: Path) -> Launch:
    """Launches a run from `folder`, by a shell command in which $RUN stands for the command line."""
    data_folder(tmp_path / "data", "sft")

    def started(folder: Path, shell: str = "$RUN", *, steps: int = 2) -> "subprocess.CompletedProcess[bytes]":
        folder.mkdir(exist_ok=True)
        (folder / "run.toml").write_text(RUN.format(model=model, data=tmp_path / "data", steps=steps))
        environ = {**os.environ, "MLX_DISABLE_COMPILE": "1", "RUN": f"{sys.executable} -m mlxdist launch run.toml"}
        return subprocess.run(
            ["sh", "-c", shell], cwd=folder, env=environ, capture_output=True, timeout=120, check=False
        )

    return started


def sentence(done: "subprocess.CompletedProcess[bytes]") -> str:
    """Asserts that the run was refused in one sentence, and returns it."""
    assert done.returncode == 2, done
    lines = done.stderr.decode().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("mlxdist: ")
    return lines[0]


def status_of(output: Path) -> str:
    status: str = json.loads((output / "metrics.json").read_bytes())["status"]
    return status


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_run_whose_streams_are_closed_trains_and_prints_into_no_file(
    closed: str, launch: Launch, tmp_path: Path
) -> None:
    done = launch(tmp_path / "here", f"$RUN {closed}")
    assert (done.returncode, done.stderr) == (0, b""), done
    output = tmp_path / "here/runs/run"
    assert status_of(output) == "done"
    assert (output / "state/lock").read_text().split()[0].isdigit()
    assert not [
        path
        for path in output.rglob("*")
        if path.is_file() and b"step 1 of 2: loss" in path.read_bytes() and path.name != "metrics.jsonl"
    ]


def test_a_run_whose_reader_goes_away_trains_to_its_end(launch: Launch, tmp_path: Path) -> None:
    launch(tmp_path / "here", "$RUN | head -n 1")
    assert status_of(tmp_path / "here/runs/run") == "done"


def test_a_folder_whose_name_is_no_utf_8_holds_a_run_as_any_other(launch: Launch, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"d\xff\xfe")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this disk takes UTF-8 names only")
    for shell, steps in (("$RUN", 2), ("$RUN --resume", 3)):
        done = launch(folder, shell, steps=steps)
        assert done.returncode == 0, done
    output = folder / "runs/run"
    for name in ("manifest.json", "config.json", "metrics.json"):
        json.loads((output / name).read_text(encoding="utf-8"))
    assert json.loads((output / "manifest.json").read_text())["adapter_path"] == str(output)


def test_too_few_open_files_are_said_with_the_limit_that_is_needed(launch: Launch, tmp_path: Path) -> None:
    done = launch(tmp_path / "here", "ulimit -n 64; $RUN")
    if done.returncode == 0:
        pytest.skip("this user may raise the hard limit")
    assert "lets a program open 64 files at most, and mlx-lm asks for 4096" in sentence(done)


@pytest.mark.parametrize("where", [".", "../data"])
def test_the_output_may_be_this_folder_or_that_of_the_data(where: str, launch: Launch, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    for shell, steps in (("", 2), ("--resume", 3)):
        done = launch(folder, f"$RUN --set output={where} {shell}", steps=steps)
        assert done.returncode == 0, done
    assert launch(tmp_path / "other", "$RUN", steps=3).returncode == 0
    assert sha(folder / where) == sha(tmp_path / "other/runs/run")


@pytest.mark.parametrize("kind", ["link", "dangling link", "folder"])
def test_a_lock_that_is_no_file_is_refused_and_what_it_leads_to_is_untouched(
    kind: str, launch: Launch, tmp_path: Path
) -> None:
    state, precious = tmp_path / "here/runs/run/state", tmp_path / "precious"
    state.mkdir(parents=True)
    if kind == "link":
        precious.write_text("hours of work")
    if kind == "folder":
        (state / "lock").mkdir()
    else:
        (state / "lock").symlink_to(precious)
    assert f"{state}/lock is a {kind.split()[-1]}" in sentence(launch(tmp_path / "here"))
    assert not precious.exists() or precious.read_text() == "hours of work"
