"""A model whose files are damaged or incomplete is refused by its headers, in one sentence."""

import json
from pathlib import Path

import pytest

from mlxdist.coordinator.memory.model_files import read_model
from mlxdist.protocol.errors import ConfigError
from tests.coordinator.storage.torn_files import TORN, WHOLE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(WHOLE)
    return tmp_path


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_model(folder)
    sentence = str(caught.value)
    assert sentence.endswith("fetch the model again")
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("damage", TORN)
def test_a_torn_file_is_named(damage: str, folder: Path) -> None:
    assert len(read_model(folder).tensors) == 2
    (folder / "model.safetensors").write_bytes(TORN[damage])
    assert f"{folder}/model.safetensors: cannot be read" in refusal(folder)


@pytest.mark.parametrize("content", ["[]", "", "{", "\0", "[" * 100_000, "3"])
def test_a_configuration_that_is_no_object_is_named(content: str, folder: Path) -> None:
    (folder / "config.json").write_text(content)
    assert f"{folder}/config.json: cannot be read (it " in refusal(folder)


def test_a_missing_file_of_several_is_named_and_an_old_index_is_not_read(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    old = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index.write_text(json.dumps({"weight_map": old}))
    assert len(read_model(folder).tensors) == 2
    (folder / "model.safetensors").rename(folder / old["a"])
    assert "it names model-00002-of-00002.safetensors, which is missing" in refusal(folder)
    (folder / old["b"]).write_bytes(WHOLE)
    assert len(read_model(folder).tensors) == 2
    for content in ("[]", '{"weight_map": []}', ""):
        index.write_text(content)
        assert f"{index}: cannot be read (it " in refusal(folder)
