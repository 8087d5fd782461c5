"""The times of saving, and a disk that takes nothing: the training goes on, and nothing that was saved is lost."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from mlxdist.coordinator.config.schema import DataConfig, RunConfig, TrainConfig
from mlxdist.coordinator.report.summary import Results
from mlxdist.coordinator.storage.adapter_files import load_adapter
from mlxdist.coordinator.storage.checkpoints import best_checkpoint, list_checkpoints
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.coordinator.training.adamw import no_moments
from mlxdist.coordinator.training.saver import PATIENCE_SECONDS, Saver
from mlxdist.coordinator.training.state import State, identity_of, load_state
from mlxdist.coordinator.training.validation import Evaluation
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol.errors import SaveError

MANIFEST = manifests.make({"model.layers.0.q_proj.lora_a": (4, 2), "model.layers.0.q_proj.lora_b": (2, 3)})


@dataclass
class FakeReport:
    """Remembers what it is told. Each save takes `cost` seconds, which pass while the events are flushed."""

    seconds: float = 1000.0
    cost: float = 0.0
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    summaries: list[tuple[str, Results]] = field(default_factory=list)

    def clock(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def sync(self) -> None:
        self.seconds += self.cost

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)

    def could_not_save(self, what: str, error: SaveError) -> None:
        self.failures.append(what)

    def saved(self, what: str) -> None:
        pass

    def checkpoint(self, step: int, path: Path, *, best: bool) -> None:
        self.checkpoints.append(step)

    def write_summary(self, ending: str, results: Results) -> None:
        self.summaries.append((ending, results))


@pytest.fixture
def report() -> FakeReport:
    return FakeReport()


def saver_of(folder: Path, report: FakeReport, save_every: int | str = "auto", keep: int | str = "all") -> Saver:
    run = RunFolder(folder)
    run.state.mkdir(parents=True)
    train = TrainConfig(save_every=save_every, keep_checkpoints=keep)  # type: ignore[arg-type]
    config = RunConfig(model="m", output=folder, data=DataConfig(path="d"), train=train)
    identity = identity_of("same", MANIFEST, "model", "")
    return Saver(run, config, MANIFEST, identity, report, clock=report.clock, sleep=report.sleep)  # type: ignore[arg-type]


def state_of(step: int) -> State:
    size = manifests.size(MANIFEST)
    return State(np.full(size, step, np.float32), replace(no_moments(size), step=step))


def saved_steps(saver: Saver, report: FakeReport, last: int, first: int = 1) -> list[int]:
    """The steps after which the state was on the disk, where each takes a second."""
    found = []
    for step in range(first, last + 1):
        report.seconds += 1.0
        saver.save_if_due(state_of(step), last=False)
        if saver.saved_step == step:
            found.append(load_state(saver.folder)[0].step)
    return found


def fails(saver: Saver) -> Path:
    """Take the folder of the state away, as if the disk had no room for it. Returns where it went."""
    return saver.folder.state.rename(saver.folder.path / "away")


def works_again(saver: Saver) -> None:
    (saver.folder.path / "away").rename(saver.folder.state)


# ---- when


def test_auto_saves_every_step_while_that_costs_under_one_percent(tmp_path: Path, report: FakeReport) -> None:
    report.cost = 0.009
    assert saved_steps(saver_of(tmp_path, report), report, 30) == list(range(1, 31))


def test_auto_saves_less_often_where_every_step_would_cost_more_and_stays_under_it(
    tmp_path: Path, report: FakeReport
) -> None:
    report.cost = 0.0451
    steps = saved_steps(saver_of(tmp_path, report), report, 101)
    assert steps == list(range(1, 102, 5))
    assert report.cost * (len(steps) - 1) <= 0.01 * 101


def test_auto_follows_the_cost_as_it_changes(tmp_path: Path, report: FakeReport) -> None:
    saver = saver_of(tmp_path, report)
    report.cost = 0.095
    assert saved_steps(saver, report, 1) == [1]
    report.cost = 0.0
    assert saved_steps(saver, report, 20, first=2) == list(range(11, 21))


def test_a_number_saves_at_its_multiples_and_the_last_step_is_always_saved(tmp_path: Path, report: FakeReport) -> None:
    saver = saver_of(tmp_path, report, save_every=4)
    assert saved_steps(saver, report, 10) == [4, 8]
    saver.save_if_due(state_of(11), last=True)
    assert load_state(saver.folder)[0].step == 11


# ---- while it cannot


def test_a_state_that_cannot_be_written_keeps_the_old_one_and_is_written_as_soon_as_it_can(
    tmp_path: Path, report: FakeReport
) -> None:
    saver = saver_of(tmp_path, report, save_every=4)
    assert saved_steps(saver, report, 4) == [4]
    fails(saver)
    for step in (8, 9):
        saver.save_if_due(state_of(step), last=False)
    assert report.failures == ["state", "state"]
    works_again(saver)
    assert load_state(saver.folder)[0].step == 4
    saver.save_if_due(state_of(10), last=False)
    assert load_state(saver.folder)[0].step == 10
    saver.save_if_due(state_of(11), last=False)
    assert load_state(saver.folder)[0].step == 10  # and from then on as before


def test_a_disk_that_fails_slowly_is_not_tried_with_every_step(tmp_path: Path, report: FakeReport) -> None:
    saver = saver_of(tmp_path, report, save_every=1)
    fails(saver)
    report.cost = 0.095
    saved_steps(saver, report, 31)
    assert len(report.failures) == 4  # steps 1, 11, 21, 31


def test_an_interrupted_run_says_that_its_state_could_not_be_saved(tmp_path: Path, report: FakeReport) -> None:
    saver = saver_of(tmp_path, report)
    fails(saver)
    with pytest.raises(SaveError, match=r"resume\.safetensors"):
        saver.save(state_of(1))


def test_the_best_adapter_waits_in_memory_for_its_checkpoint_and_others_are_left_out(
    tmp_path: Path, report: FakeReport
) -> None:
    saver = saver_of(tmp_path, report, save_every=1)
    saver.checkpoint(state_of(1), Evaluation(1, 3.0, is_best=True))
    saver.folder.checkpoints.rename(tmp_path / "kept")
    saver.folder.checkpoints.write_text("in the way")
    saver.checkpoint(state_of(2), Evaluation(2, 2.0, is_best=True))
    saver.checkpoint(state_of(3), Evaluation(3, 2.5, is_best=False))
    assert report.failures == ["checkpoint", "checkpoint"]
    saver.folder.checkpoints.unlink()
    (tmp_path / "kept").rename(saver.folder.checkpoints)
    saver.save_if_due(state_of(4), last=False)
    assert [checkpoint.step for checkpoint in list_checkpoints(saver.folder)] == [1, 2]
    best = best_checkpoint(saver.folder)
    assert best is not None
    assert best.name == "step-00002-val2.0000"
    assert set(load_adapter(best)[0]["model.layers.0.q_proj.lora_a"].ravel()) == {2.0}
    assert report.checkpoints == [1, 2]


# ---- at the end


def test_a_run_that_has_taken_all_its_steps_waits_until_it_can_be_saved(tmp_path: Path, report: FakeReport) -> None:
    saver = saver_of(tmp_path, report)
    fails(saver)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            works_again(saver)

    replace(saver, sleep=sleep).final(state_of(7))
    assert load_state(saver.folder)[0].step == 7
    assert set(load_adapter(tmp_path)[0]["model.layers.0.q_proj.lora_a"].ravel()) == {7.0}
    ((ending, results),) = report.summaries
    assert (ending, results.applied_ranks) == ("done", {"model.layers.0.q_proj": 2})
    assert len(report.notes) == 1
    assert "kept in memory: writing is tried every 10 s for 12 hours; check the disk." in report.notes[0]


def test_it_does_not_wait_for_ever(tmp_path: Path, report: FakeReport) -> None:
    saver = saver_of(tmp_path, report)
    fails(saver)
    began, waiting = report.seconds, replace(saver, sleep=lambda seconds: report.sleep(100 * seconds))
    with pytest.raises(SaveError, match=r"resume\.safetensors"):
        waiting.final(state_of(7))
    assert PATIENCE_SECONDS <= report.seconds - began <= PATIENCE_SECONDS + 1000
