"""The layout of peft: the same change of every matrix, there and back, and what is not LoRA is refused by its name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mlxdist.coordinator.storage.adapter_files import load_adapter
from mlxdist.coordinator.storage.peft_files import write_peft
from mlxdist.protocol.errors import UserError

LAYER, SWITCH = "model.layers.0", "model.layers.0.mlp.switch_mlp"
Arrays = Mapping[str, np.ndarray[Any, Any]]


def drawn(*shape: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def linear(name: str, rank: int, inputs: int = 6, outputs: int = 5) -> Arrays:
    seed = sum(map(ord, name))
    return {f"{name}.lora_a": drawn(inputs, rank, seed=seed), f"{name}.lora_b": drawn(rank, outputs, seed=seed)}


def experts(name: str, rank: int, inputs: int = 6, outputs: int = 4, count: int = 3) -> Arrays:
    seed = sum(map(ord, name))
    a, b = drawn(count, rank, inputs, seed=seed), drawn(count, outputs, rank, seed=seed)
    return {f"{name}.lora_a": a, f"{name}.lora_b": b}


DENSE = {**linear(f"{LAYER}.self_attn.q_proj", 4), **linear(f"{LAYER}.mlp.down_proj", 7), **linear("lm_head", 4)}
MIXED = {
    **linear(f"{LAYER}.self_attn.q_proj", 4),
    **experts(f"{SWITCH}.gate_proj", 2),
    **experts(f"{SWITCH}.up_proj", 3),
    **experts(f"{SWITCH}.down_proj", 2, inputs=4, outputs=6),
}


def written(folder: Path, tensors: Arrays, scale: float = 1.5, model_type: str = "qwen3_moe") -> dict[str, Any]:
    write_peft(folder, tensors, scale=scale, base_model="org/base", model_type=model_type)
    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return config


@pytest.mark.parametrize("tensors", [DENSE, MIXED], ids=["dense", "experts"])
def test_an_adapter_comes_back_as_it_was(tensors: Arrays, tmp_path: Path) -> None:
    written(tmp_path, tensors, scale=1.5)
    loaded, config = load_adapter(tmp_path)
    assert config["lora_parameters"] == {"scale": 1.5}
    assert sorted(loaded) == sorted(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(loaded[name], tensor)


def test_every_matrix_changes_by_the_same_product(tmp_path: Path) -> None:
    config = written(tmp_path, DENSE, scale=1.5)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    for module in ("lm_head", f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.down_proj"):
        rank = config["rank_pattern"].get(module, config["r"])
        alpha = config["alpha_pattern"].get(module, config["lora_alpha"])
        a, b = (stored[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
        assert a.shape[0] == b.shape[1] == rank
        ours = 1.5 * (DENSE[f"{module}.lora_a"] @ DENSE[f"{module}.lora_b"]).T
        np.testing.assert_allclose(alpha / rank * b @ a, ours, rtol=1e-5, atol=1e-6)
    assert (config["r"], config["rank_pattern"]) == (4, {f"{LAYER}.mlp.down_proj": 7})
    assert config["target_modules"] == ["lm_head", f"{LAYER}.mlp.down_proj", f"{LAYER}.self_attn.q_proj"]


def test_every_expert_changes_by_the_same_product(tmp_path: Path) -> None:
    """By peft's rule: lora_A [experts, r, in], lora_B [out, r, experts]; gate stands above up, down is outermost."""
    config = written(tmp_path, MIXED, scale=1.5)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    place = f"base_model.model.{LAYER}.mlp.experts"
    changes = {}
    for parameter, below, rank in (("gate_up_proj", ".base_layer", 5), ("down_proj", "", 2)):
        name = f"{LAYER}.mlp.experts.{parameter}"
        assert config["rank_pattern"].get(name, config["r"]) == rank
        a, b = (stored[f"{place}{below}.lora_{side}.weight"] for side in "AB")
        alpha = config["alpha_pattern"].get(name, config["lora_alpha"])
        per_a, per_b = a.reshape(3, rank, -1), b.reshape(len(b), rank, 3).transpose(2, 0, 1)
        changes[parameter] = alpha / rank * per_b @ per_a
    ours = {
        name: 1.5 * MIXED[f"{SWITCH}.{name}.lora_b"] @ MIXED[f"{SWITCH}.{name}.lora_a"]
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    both = np.concatenate([ours["gate_proj"], ours["up_proj"]], axis=1)
    np.testing.assert_allclose(changes["gate_up_proj"], both, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(changes["down_proj"], ours["down_proj"], rtol=1e-5, atol=1e-6)
    assert config["target_parameters"] == [f"{LAYER}.mlp.experts.gate_up_proj", f"{LAYER}.mlp.experts.down_proj"]


@pytest.mark.parametrize("only", ["gate_proj", "up_proj", "down_proj"])
def test_one_adapted_projection_of_the_experts_comes_back_alone(only: str, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in MIXED.items() if f".{only}." in name}
    written(tmp_path, tensors)
    loaded, _ = load_adapter(tmp_path)
    assert sorted(loaded) == sorted(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(loaded[name], tensor)


def test_experts_of_an_unknown_layout_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not for gpt_oss"):
        written(tmp_path, MIXED, model_type="gpt_oss")
    assert written(tmp_path, DENSE, model_type="gpt_oss")["r"] == 4


# ---- adapters that peft has trained


def peft_folder(folder: Path, change: Mapping[str, Any] | None = None, **tensors: np.ndarray[Any, Any]) -> Path:
    """A peft adapter of rank 4 and alpha 8 on two modules."""
    content = {}
    for module in ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"):
        content[f"base_model.model.{module}.lora_A.weight"] = drawn(4, 6, seed=1)
        content[f"base_model.model.{module}.lora_B.weight"] = drawn(5, 4, seed=2)
    save_file({**content, **tensors}, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "use_dora": False, "modules_to_save": None}
    (folder / "adapter_config.json").write_text(json.dumps({**config, **(change or {})}))
    return folder


def test_alpha_over_r_becomes_the_scale(tmp_path: Path) -> None:
    tensors, config = load_adapter(peft_folder(tmp_path))
    assert config["lora_parameters"] == {"scale": 2.0}
    np.testing.assert_array_equal(tensors["model.layers.0.self_attn.q_proj.lora_a"], drawn(4, 6, seed=1).T)
    np.testing.assert_array_equal(tensors["model.layers.0.self_attn.q_proj.lora_b"], drawn(5, 4, seed=2).T)
    _, rs = load_adapter(peft_folder(tmp_path, {"use_rslora": True}))
    assert rs["lora_parameters"] == {"scale": 4.0}


def test_a_module_with_its_own_alpha_has_it_in_its_tensors(tmp_path: Path) -> None:
    tensors, config = load_adapter(peft_folder(tmp_path, {"alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 2}}))
    plain, _ = load_adapter(peft_folder(tmp_path))
    name = "model.layers.{}.self_attn.q_proj.lora_b"
    scale = config["lora_parameters"]["scale"]  # type: ignore[index]  # a table
    np.testing.assert_allclose(scale * tensors[name.format(0)], 2.0 * plain[name.format(0)], rtol=1e-6)
    np.testing.assert_allclose(scale * tensors[name.format(1)], 0.5 * plain[name.format(1)], rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "trained biases"),
        ({"lora_bias": True}, "lora_bias"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"r": 5}, "has rank 4, and its configuration says 5"),
        ({"rank_pattern": {"q_proj": 2}}, "has rank 4, and its configuration says 2"),
    ],
)
def test_what_is_not_lora_alone_is_refused_by_its_name(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        load_adapter(peft_folder(tmp_path, change))


@pytest.mark.parametrize("name", ["base_model.model.x.lora_magnitude_vector", "other.lora_A.weight"])
def test_a_tensor_that_is_no_matrix_of_lora_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=name):
        load_adapter(peft_folder(tmp_path, **{name: drawn(2, 2, seed=0)}))


def test_half_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"x lacks lora_B\.weight"):
        load_adapter(peft_folder(tmp_path, **{"base_model.model.x.lora_A.weight": drawn(4, 6, seed=0)}))
