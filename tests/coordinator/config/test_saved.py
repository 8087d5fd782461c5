"""The configuration of a run, read back from its config.json."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mlxdist.coordinator.config.load import load_config
from mlxdist.coordinator.config.saved import run_at, saved_config
from mlxdist.coordinator.config.schema import RunConfig, as_json
from mlxdist.coordinator.storage.run_folder import RunFolder, write_json
from mlxdist.protocol.errors import UserError

RUN = """
model = "model"
method = "dpo"
output = "out"
[data]
path = "rows.jsonl"
columns = {prompt = ["instruction", "input"]}
chat_template_kwargs = {enable_thinking = false}
[train]
epochs = 1.5
betas = [0.8, 0.9]
[memory]
segment_size = 2
[preference]
beta = 0.3
"""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "model").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "run.toml").write_text(RUN)
    config = load_config(tmp_path / "run.toml")
    write_json(RunFolder(config.output).config, {**as_json(config), "numerics_id": "x", "schedules": []})
    return config


def test_it_is_the_configuration_that_was_written(config: RunConfig) -> None:
    assert saved_config(RunFolder(config.output)) == config


def test_a_run_is_named_by_its_folder_or_by_its_file(config: RunConfig, tmp_path: Path) -> None:
    assert run_at(tmp_path / "out") == run_at(tmp_path / "run.toml") == RunFolder(config.output)


def test_a_folder_that_was_moved_is_still_the_run(config: RunConfig, tmp_path: Path) -> None:
    config.output.rename(tmp_path / "moved")
    moved = run_at(tmp_path / "moved")
    assert saved_config(moved) == replace(config, output=tmp_path / "moved")


def test_a_base_model_that_has_moved_is_named(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"leads to .*model.*--model"):
        saved_config(RunFolder(config.output))
    moved = saved_config(RunFolder(config.output), model=str(tmp_path / "elsewhere"))
    assert moved.model == str(tmp_path / "elsewhere")


def test_a_folder_without_a_run_and_a_damaged_configuration_are_refused(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not a run: it has no config\.json"):
        run_at(tmp_path / "model")
    with pytest.raises(UserError, match="there is no such folder"):
        run_at(tmp_path / "nowhere")
    path = RunFolder(config.output).config
    values = json.loads(path.read_text())
    for damage in ({**values, "batch": {"size": "many"}}, {"method": "sft"}):
        path.write_text(json.dumps(damage))
        with pytest.raises(UserError, match="cannot be used"):
            saved_config(RunFolder(config.output))
    path.write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        saved_config(RunFolder(config.output))
