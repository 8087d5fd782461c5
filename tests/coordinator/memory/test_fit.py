import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxdist.coordinator.config.hosts import NodeSpec, local_hosts
from mlxdist.coordinator.config.run_spec import run_spec
from mlxdist.coordinator.config.schema import BatchConfig, DataConfig, LoraConfig, MemoryConfig, RunConfig
from mlxdist.coordinator.memory.fit import Machine, fit, kept_settings, node_limits
from mlxdist.coordinator.memory.model_files import adapter_elements, find_model, read_model
from mlxdist.protocol.budget import limit_bytes, usable_bytes
from mlxdist.protocol.errors import ConfigError
from tests.laws.memory_fleet import ListRows, make_row
from tests.laws.model_folder import llama_folder

LARGE = Machine(64 * 2**30, 60 * 2**30, "Darwin")


def rows(length: int = 60) -> ListRows:
    return ListRows([make_row(i, list(range(length)), 3) for i in range(4)])


def config_of(model: Path, *, max_length: int = 64, **memory: Any) -> RunConfig:
    return RunConfig(
        model=str(model),
        output=model / "run",
        data=DataConfig(path="none"),
        batch=BatchConfig(size=4, max_length=max_length),
        lora=LoraConfig(rank=4),
        memory=MemoryConfig(**memory),
    )


def long_model(folder: Path, **sizes: int) -> Path:
    """Makes a model folder that is large by its configuration and headers, but tiny on the disk."""
    config = {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "intermediate_size": 8192,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 32000,
        "torch_dtype": "float32",
        **sizes,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {f"model.layers.{i}.self_attn.q_proj.weight": [2048, 2048] for i in range(24)}
    shapes["model.embed_tokens.weight"] = [149_336_700]  # 1 GB in all, of which nothing is on the disk
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps({"__metadata__": {}, **header}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def test_adapter_and_model_are_counted_from_headers_as_they_are_loaded(tmp_path: Path) -> None:
    from mlxdist.node.work import model as models

    for name, mixed in (("plain", False), ("mixed", True)):
        folder = llama_folder(tmp_path / name, mixed=mixed)
        for lora in (LoraConfig(rank=8), LoraConfig(rank=8, num_layers=1, target_modules=("q_proj", "mlp.down_proj"))):
            config = replace(config_of(folder), lora=lora)
            loaded = models.load_with_lora(run_spec(config), lambda sentence: None)
            elements = sum(int(np.prod(tensor.shape)) for tensor in loaded.manifest)
            files = read_model(folder)
            assert adapter_elements(files, lora) == elements
            total = sum(value.nbytes for _, value in models_parameters(loaded.model))
            assert files.nbytes + 4 * elements == total


def models_parameters(model: Any) -> Any:
    from mlx.utils import tree_flatten

    return tree_flatten(model.parameters())


def test_auto_is_resolved_once_and_goes_into_the_configuration(model: Path) -> None:
    fitted = fit(config_of(model), [rows()], local_hosts(2).nodes, LARGE)
    assert fitted.config.memory.segment_size == "off"
    assert isinstance(fitted.config.memory.head_chunk, int)
    spec = run_spec(fitted.config)
    assert (spec.segment_size, spec.head_chunk) == (0, fitted.config.memory.head_chunk)
    assert len(fitted.notes) == 1


def test_what_the_user_asked_for_is_kept(model: Path) -> None:
    for memory in ({"segment_size": 2, "head_chunk": 7}, {"segment_size": "off", "grad_checkpoint": True}):
        fitted = fit(config_of(model, **memory), [rows()], local_hosts(1).nodes, LARGE).config.memory
        assert {key: getattr(fitted, key) for key in memory} == memory


def test_the_smallest_node_decides_and_what_is_free_now_counts(tmp_path: Path) -> None:
    config = replace(config_of(long_model(tmp_path / "m")), batch=BatchConfig(size=4, max_length=4096))
    nodes = (NodeSpec(name="a", host="far-a", memory_limit_gb=64), NodeSpec(name="b", host="far-b", memory_limit_gb=8))
    assert fit(config, [rows(2048)], nodes[:1], LARGE).config.memory.segment_size == "off"
    assert fit(config, [rows(2048)], nodes, LARGE).config.memory.segment_size == 1
    busy = Machine(LARGE.total, 8 * 10**9, "Darwin")
    assert fit(config, [rows(2048)], local_hosts(1).nodes, busy).config.memory.segment_size == 1
    full = fit(config, [rows(2048)], local_hosts(1).nodes, Machine(LARGE.total, 10**9, "Darwin"))
    assert full.config.memory.segment_size == 1
    assert "close other programs" in full.notes[1]


def test_a_node_that_cannot_hold_the_run_is_refused_with_the_length_that_would_fit(tmp_path: Path) -> None:
    folder = long_model(tmp_path / "m")
    config = replace(config_of(folder), batch=BatchConfig(size=4, max_length=8192))
    nodes = (NodeSpec(name="mini", host="far", memory_limit_gb=4),)
    with pytest.raises(
        ConfigError, match=r"node mini may use 4\.0 GB, .* batch\.max_length = (\d+) would fit"
    ) as caught:
        fit(config, [rows(8192)], nodes, LARGE)
    longest = int(str(caught.value).partition("batch.max_length = ")[2].partition(" ")[0])
    for length, fits in ((longest, True), (longest + 1, False)):
        shorter = replace(config, batch=BatchConfig(size=4, max_length=length))
        if fits:
            assert fit(shorter, [rows(8192)], nodes, LARGE).config.memory.segment_size == 1
        else:
            with pytest.raises(ConfigError):
                fit(shorter, [rows(8192)], nodes, LARGE)


def test_a_setting_that_does_not_fit_is_refused_with_the_one_that_does(tmp_path: Path) -> None:
    config = replace(config_of(long_model(tmp_path / "m"), segment_size="off"), batch=BatchConfig(max_length=2048))
    nodes = (NodeSpec(name="mini", host="far", memory_limit_gb=8),)
    with pytest.raises(ConfigError, match=r'memory\.segment_size = "auto"'):
        fit(config, [rows(2048)], nodes, LARGE)


def test_a_model_larger_than_the_node_is_said_to_be_that(tmp_path: Path) -> None:
    nodes = (NodeSpec(name="mini", host="far", memory_limit_gb=1),)
    with pytest.raises(ConfigError, match="The model does not fit"):
        fit(config_of(long_model(tmp_path / "m")), [rows()], nodes, LARGE)


def test_a_joiner_that_does_not_fit_is_refused_by_what_it_says_of_itself(tmp_path: Path) -> None:
    config = replace(config_of(long_model(tmp_path / "m")), batch=BatchConfig(size=4, max_length=4096))
    memory = fit(config, [rows(4096)], local_hosts(1).nodes, LARGE).memory
    small = {"memory_bytes": str(4 * 2**30), "system": "Darwin 24.1"}
    assert "late may use 2.9 GB" in (memory.refusal("late", small) or "")
    assert memory.refusal("late", {**small, "memory_bytes": str(64 * 2**30)}) is None
    assert memory.refusal("late", {}) is None


def test_a_resumed_run_keeps_what_auto_meant(model: Path) -> None:
    before = {"memory.segment_size": 1, "memory.head_chunk": 32}
    kept = kept_settings(before, config_of(model)).memory
    assert (kept.segment_size, kept.head_chunk) == (1, 32)
    other = kept_settings(before, config_of(model, segment_size="off", head_chunk=64)).memory
    assert (other.segment_size, other.head_chunk) == ("off", 64)


def test_without_the_models_files_the_smallest_settings_are_taken(tmp_path: Path) -> None:
    fitted = fit(config_of(tmp_path), [rows()], local_hosts(1).nodes, LARGE)
    assert fitted.config.memory.segment_size == 1
    assert "not predicted" in fitted.notes[0]
    assert find_model("nobody/has-this") is None
    assert find_model("no such folder: at all") is None


def test_broken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_model(tmp_path)


def test_nodes_on_one_machine_share_it() -> None:
    limits = node_limits(local_hosts(4).nodes, LARGE)
    assert {limit for limit, _ in limits.values()} == {usable_bytes(LARGE.total, "Darwin") // 4}
    assert node_limits([NodeSpec(name="far", host="far")], LARGE) == {}


def test_nodes_on_another_machine_share_that_one_once_it_was_seen() -> None:
    nodes = [NodeSpec(name="here", host="localhost")] + [NodeSpec(name=each, host="far") for each in ("a", "b")]
    far = Machine(16 * 2**30, usable_bytes(16 * 2**30, "Darwin"), "Darwin")
    limits = node_limits(nodes, LARGE, {"a": far, "b": far})
    assert limits["a"] == limits["b"] == (far.available // 2, far.available // 2)
    assert limits["here"][0] == usable_bytes(LARGE.total, "Darwin")


def test_a_limit_is_clamped_to_the_machine_and_a_small_mac_gives_two_thirds() -> None:
    total = 16 * 2**30
    assert limit_bytes(100.0, total, "Darwin") == total
    assert limit_bytes(8.0, total, "Darwin") == 8 * 10**9
    assert limit_bytes(0.0, total, "Darwin") == pytest.approx(11.45e9, rel=1e-3)
