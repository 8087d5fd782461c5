"""A disk that fills up during a run: a real file system of one megabyte, and real processes."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from mlxdist.coordinator.storage.adapter_files import load_adapter
from mlxdist.coordinator.storage.checkpoints import list_checkpoints
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.coordinator.training.state import load_state
from tests.faults.fault_runs import config_of, events, sha
from tests.faults.forked_coordinator import Coordinator, Coordinators

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

STEPS = 14
RUN = """
model = "{model}"
method = "sft"
data = "{data}"
output = "{output}"
[batch]
size = 4
[lora]
rank = 4
[train]
steps = 14
learning_rate = 1e-2
eval_every = 0
save_every = 1
"""


@contextmanager
def mounted(folder: Path, size: str = "1m") -> Iterator[Path]:
    """A file system of one megabyte at `folder`, while the block lasts."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting a small file system needs root on Linux: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    with mounted(tmp_path / "disk") as folder:
        yield folder


@pytest.fixture(scope="module")
def whole(launcher: Coordinators, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with enough space."""
    folder = tmp_path_factory.mktemp("whole")
    coordinator = launcher.start(write_run(folder, model, folder / "run"))
    assert coordinator.wait() == 0, coordinator.said.read_text()
    return folder / "run"


def write_run(folder: Path, model: Path, output: Path) -> Path:
    data = config_of(model, folder / "none", "sft").data.path
    path = folder / "run.toml"
    path.write_text(RUN.format(model=model, data=data, output=output))
    return path


def wait_until(coordinator: Coordinator, happened: Callable[[], bool]) -> None:
    while not happened():
        assert coordinator.code is None, coordinator.said.read_text()
        time.sleep(0.005)


def fill(disk: Path) -> Path:
    """Takes all free space."""
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as stream:
        for size in (4096, 64, 1):
            try:
                while stream.write(b"x" * size):
                    pass
            except OSError:
                continue
    return filler


def test_a_full_disk_stops_no_step_is_reported_once_and_all_lines_are_there_when_there_is_space_again(
    launcher: Coordinators, whole: Path, model: Path, small_disk: Path, tmp_path: Path
) -> None:
    output = small_disk / "run"
    run = write_run(tmp_path, model, output)
    coordinator = launcher.start(run, sets=("train.report_every=1",))
    wait_until(coordinator, lambda: len(events(output, "train")) >= 2)
    filler = fill(small_disk)
    wait_until(coordinator, lambda: "kept in memory" in coordinator.said.read_text())
    state, _ = load_state(RunFolder(output))  # the complete one from before the disk was full
    assert 1 <= state.step < STEPS
    assert not (output / "adapters.safetensors").exists()
    filler.unlink()
    assert coordinator.wait() == 0, coordinator.said.read_text()

    said = coordinator.said.read_text()
    assert said.count("the disk is full. The one from before is kept. The run goes on") == 1
    assert said.count("the disk is full") == 2  # the second message says that the run waits for space
    assert "free some space" in said
    assert said.count("writing works again") == 1
    assert "Traceback" not in said
    assert sha(output) == sha(whole)
    assert [event["step"] for event in events(output, "train")] == list(range(1, STEPS + 1))
    assert json.loads((output / "metrics.json").read_text())["steps"] == STEPS
    assert load_state(RunFolder(output))[0].step == STEPS


@pytest.mark.parametrize("full", ["checkpoints", "state", "metrics", "logs"])
def test_a_disk_that_is_full_for_one_kind_of_file_costs_no_bit_and_no_line(
    full: str, launcher: Coordinators, whole: Path, model: Path, tmp_path: Path
) -> None:
    output, kinds = tmp_path / "run", ("checkpoints", "state", "logs")
    with ExitStack() as disks:
        if full in kinds:
            disk = disks.enter_context(mounted(output / full))
        else:  # the folder itself is small, and all below it is not
            disk = disks.enter_context(mounted(output))
            for kind in kinds:
                disks.enter_context(mounted(output / kind, "8m"))
        coordinator = launcher.start(
            write_run(tmp_path, model, output), sets=("train.report_every=1", "train.eval_every=1")
        )
        wait_until(coordinator, lambda: len(events(output, "train")) >= 2)
        filler = fill(disk)
        if full in ("state", "metrics"):
            wait_until(coordinator, lambda: "kept in memory" in coordinator.said.read_text())
            filler.unlink()
        assert coordinator.wait() == 0, coordinator.said.read_text()

        said = coordinator.said.read_text()
        assert said.count("the disk is full. ") == {"checkpoints": 1, "logs": 0}.get(full, 2)
        assert "Traceback" not in said
        assert sha(output) == sha(whole)
        assert [event["step"] for event in events(output, "train")] == list(range(1, STEPS + 1))
        last, previous = (load_state(RunFolder(output), previous=one)[0].step for one in (False, True))
        assert last == STEPS
        assert previous == STEPS - 1 or full == "state"
        saved = list_checkpoints(RunFolder(output))
        assert saved
        for checkpoint in saved:
            load_adapter(checkpoint.path)
        assert not list(output.rglob(".*.aside"))


def test_a_coordinator_killed_with_a_full_disk_resumes_from_the_old_state_with_the_same_bits(
    launcher: Coordinators, whole: Path, model: Path, small_disk: Path, tmp_path: Path
) -> None:
    output = small_disk / "run"
    run = write_run(tmp_path, model, output)
    coordinator = launcher.start(run)
    wait_until(coordinator, lambda: len(events(output, "train")) >= 2)
    filler = fill(small_disk)
    wait_until(coordinator, lambda: "the disk is full" in coordinator.said.read_text())
    coordinator.kill()
    filler.unlink()
    again = launcher.start(run, resume=True)
    assert again.wait() == 0, again.said.read_text()
    assert sha(output) == sha(whole)
    assert [event["step"] for event in events(output, "train")] == list(range(1, STEPS + 1))


def test_a_disk_that_is_full_from_the_start_is_refused_before_a_step_is_taken(
    launcher: Coordinators, model: Path, small_disk: Path, tmp_path: Path
) -> None:
    (small_disk / "run").mkdir()
    fill(small_disk)
    coordinator = launcher.start(write_run(tmp_path, model, small_disk / "run"))
    assert coordinator.wait() == 1
    said = coordinator.said.read_text()
    assert "run: the disk is full. Nothing was written. Free some space" in said
    assert "Traceback" not in said
