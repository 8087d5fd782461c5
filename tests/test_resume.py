"""What a run may be resumed with: settings that change its length or its words, never those that change a step."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mlxdist.coordinator.config import BatchConfig, DataConfig, RunConfig, TrainConfig, as_json
from mlxdist.coordinator.resume import resume_notes
from mlxdist.coordinator.run_folder import RunFolder
from mlxdist.protocol.errors import UserError

DIGEST = "a"
CONFIG = RunConfig(model="m", output=Path("runs"), data=DataConfig(path="rows.jsonl"))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path)
    run.config.write_text(json.dumps({**as_json(CONFIG), "data_digest": DIGEST}), encoding="utf-8")
    return run


def test_the_same_settings_and_data_need_no_word(folder: RunFolder) -> None:
    assert resume_notes(folder, CONFIG, DIGEST) == []
    assert resume_notes(folder, replace(CONFIG, output=Path("moved")), DIGEST) == []


def test_a_longer_run_goes_on_and_the_difference_is_said(folder: RunFolder) -> None:
    longer = replace(CONFIG, train=TrainConfig(steps=200, eval_every=10))
    assert resume_notes(folder, longer, DIGEST) == [
        "resumed with another setting: train.steps was 100, is 200",
        "resumed with another setting: train.eval_every was 50, is 10",
    ]


def test_every_setting_that_changes_a_step_is_named_with_both_values(folder: RunFolder) -> None:
    other = replace(CONFIG, batch=BatchConfig(size=4), train=TrainConfig(learning_rate=1e-3))
    with pytest.raises(UserError) as caught:
        resume_notes(folder, other, DIGEST)
    assert "batch.size was 8, is 4; train.learning_rate was 0.0002, is 0.001" in str(caught.value)
    assert "lora.init_adapter" in str(caught.value)


def test_other_training_rows_are_refused_wherever_the_file_stands(folder: RunFolder) -> None:
    with pytest.raises(UserError, match="the training rows, or how they are tokenised, are not the same"):
        resume_notes(folder, CONFIG, "other")
    moved = replace(CONFIG, data=DataConfig(path="elsewhere.jsonl"))
    assert len(resume_notes(folder, moved, DIGEST)) == 1
