"""A model read without its parameters: the sizes, targets and refusals are those of the node that loads it."""

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import save_model

from mlxdist.coordinator.config.run_spec import run_spec
from mlxdist.coordinator.config.schema import DataConfig, LoraConfig, RunConfig
from mlxdist.coordinator.memory.model_files import read_model
from mlxdist.coordinator.memory.model_tree import TOKEN_BY_TOKEN, UnloadableError, read_tree
from mlxdist.node.work import model as models
from mlxdist.protocol.errors import ConfigError
from scripts.tiny_architectures import tiny_config, tiny_model
from tests.cases import slow_but

LORA = LoraConfig()
ALL = LoraConfig(target_modules="all-linear")


def folder_of(path: Path, architecture: str, tensors: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A folder of a tiny model with random parameters; `changes` are of its config.json alone."""
    path.mkdir(parents=True, exist_ok=True)
    model = tiny_model(architecture)
    save_model(path, model)
    if tensors:
        (path / "model.safetensors.index.json").unlink(missing_ok=True)
        mx.save_safetensors(str(path / "model-of-more.safetensors"), tensors)
    (path / "config.json").write_text(json.dumps({**tiny_config(architecture), **changes}))
    return path


def loaded_by_a_node(folder: Path, lora: LoraConfig) -> models.LoadedModel:
    config = RunConfig(model=str(folder), output=folder, data=DataConfig(path="x"), lora=lora)
    return models.load_with_lora(run_spec(config), lambda sentence: None)


@pytest.mark.parametrize("lora", [LORA, ALL, replace(ALL, num_layers=1)], ids=["default", "all", "last"])
@pytest.mark.parametrize(
    "architecture",
    slow_but(("llama", "qwen3_moe"), ["llama", "qwen3_moe", "jamba", "mamba", "gemma3n", "qwen3_5"]),
)
def test_the_coordinator_counts_what_a_node_trains_and_refuses_what_a_node_refuses(
    tmp_path: Path, architecture: str, lora: LoraConfig
) -> None:
    folder = folder_of(tmp_path / "model", architecture)
    said: list[str] = []
    for read in (lambda: read_tree(folder, str(folder), lora), lambda: loaded_by_a_node(folder, lora)):
        try:
            read()
        except ConfigError as error:
            said.append(str(error))
    assert len(said) in (0, 2)
    if said:
        assert said[0] == said[1]
        return
    tree, loaded = read_tree(folder, str(folder), lora), loaded_by_a_node(folder, lora)
    assert tree.elements == sum(int(np.prod(tensor.shape)) for tensor in loaded.manifest)
    total = sum(pair[1].nbytes for pair in tree_flatten(loaded.model.parameters()))  # type: ignore[misc]
    assert tree.nbytes + 4 * tree.elements == total


def test_reading_a_model_evaluates_none_of_its_parameters(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "llama")
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    tree = read_tree(folder, "m", LORA)
    assert mx.get_peak_memory() - before < tree.nbytes / 10


def test_targets_that_a_model_lacks_are_refused_with_those_that_it_has_and_all_linear(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "mamba")
    with pytest.raises(ConfigError, match=r"no layer .* has .*q_proj, .*; .* in_proj, .*\"all-linear\" takes them all"):
        read_tree(folder, "m", LORA)
    assert read_tree(folder, "m", ALL).elements > 0


@pytest.mark.parametrize(("architecture", "reached"), [("qwen3_5", 2), ("jamba", 2)])
def test_targets_that_reach_a_part_of_a_hybrid_are_said_with_their_shares_and_the_setting(
    tmp_path: Path, architecture: str, reached: int
) -> None:
    folder = folder_of(tmp_path / "model", architecture)
    note = read_tree(folder, "m", LORA).note
    everything = read_tree(folder, "m", ALL).elements
    assert note.startswith(f"lora.target_modules are in {reached} of 4 layers only and hold ")
    assert f'"all-linear" reaches all layers with {everything:,} parameters' in note
    assert read_tree(folder, "m", ALL).note == ""


@pytest.mark.parametrize("architecture", ["llama", "gemma3n", "mistral3"])
def test_targets_of_a_model_whose_layers_are_alike_need_no_sentence(tmp_path: Path, architecture: str) -> None:
    folder = folder_of(tmp_path / "model", architecture)
    for names in (LORA.target_modules, ("q_proj",), ("self_attn.o_proj", "down_proj")):
        assert read_tree(folder, "m", replace(LORA, target_modules=names)).note == ""


def test_targets_that_are_every_expert_are_said_with_the_adapter_that_leaves_them_out(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "qwen3_moe")
    note = read_tree(folder, "m", LORA).note
    attention = replace(LORA, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
    small = read_tree(folder, "m", attention)
    assert "each of 4 experts among them" in note
    said = 'lora.target_modules = ["q_proj", "k_proj", "v_proj", "o_proj"] leaves the experts out'
    assert f"{said} and has {small.elements:,} parameters" in note
    assert small.note == ""
    assert "4 of 4 layers and hold" in note


def test_a_vision_config_alone_and_vision_tensors_that_are_not_loaded_count_for_nothing(tmp_path: Path) -> None:
    plain = read_tree(folder_of(tmp_path / "plain", "qwen3_5"), "m", ALL)
    tower = {"vision_tower.layers.0.self_attn.q_proj.weight": mx.zeros((64, 64))}
    seeing = folder_of(tmp_path / "seeing", "qwen3_5", tower, vision_config={"hidden_size": 64})
    assert read_tree(seeing, "m", ALL) == plain
    assert read_model(seeing).nbytes == read_model(tmp_path / "plain").nbytes
    empty = folder_of(tmp_path / "empty", "llama", vision_config={})
    assert loaded_by_a_node(empty, LORA).manifest


def test_a_loaded_tower_is_refused_with_the_command_that_takes_it_out() -> None:
    import mlx.nn as nn

    from mlxdist.protocol.lora_targets import refuse_other_senses

    model = nn.Module()
    model.language_model, model.vision_tower = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"mlx_lm\.convert --hf-path org/sees --mlx-path text-only"):
        refuse_other_senses(model, "org/sees")


def test_a_model_that_cannot_be_loaded_is_told_apart_from_one_that_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "llama", model_type="unknown_kind")
    with pytest.raises(UnloadableError, match=r"model 'm' cannot be loaded: .*unknown_kind"):
        read_tree(folder, "m", LORA)


# ---- layers that are trained token by token


@pytest.mark.parametrize(("architecture", "layer"), [("mamba", "MambaBlock"), ("rwkv7", "Rwkv7TimeMixing")])
def test_layers_that_are_trained_token_by_token_are_named_as_slow(
    tmp_path: Path, architecture: str, layer: str
) -> None:
    tree = read_tree(folder_of(tmp_path / "model", architecture), "m", ALL)
    assert f"mlx-lm trains 4 layers of this model ({layer}) token by token" in tree.slow


@pytest.mark.parametrize("architecture", ["llama", "mamba2", "qwen3_next", "kimi_linear"])
def test_layers_that_are_trained_in_parallel_or_in_chunks_are_not(tmp_path: Path, architecture: str) -> None:
    assert not read_tree(folder_of(tmp_path / "model", architecture), "m", ALL).slow


def test_every_loop_over_tokens_in_mlx_lm_is_known() -> None:
    """A new mlx-lm with another one, or without one of these, is noticed here."""
    import mlx_lm.models

    for module, layer in TOKEN_BY_TOKEN:
        assert hasattr(importlib.import_module(f"mlx_lm.models.{module}"), layer)
    sources = {path.stem: path.read_text(encoding="utf-8") for path in Path(mlx_lm.models.__path__[0]).glob("*.py")}
    looping = {name for name, text in sources.items() if re.search(r"for t in range\((T|L|x\.shape\[1\])\)", text)}
    assert looping == {module for module, _ in TOKEN_BY_TOKEN} | {"gated_delta"}
