"""The adapter's files: what mlx-lm loads from them is the model that was trained, whatever the ranks."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from safetensors.numpy import load_file

from mlxdist.coordinator.export import export_adapter, module_keys
from mlxdist.coordinator.storage.adapter_files import applied_ranks, load_adapter
from mlxdist.protocol.errors import UserError
from tests.coordinator.storage.torn_files import TORN

SCALE = 2.5
IDS = mx.array([[1, 5, 9, 3, 7, 2, 11, 30]])


def save_model(folder: Path, *, mixed: bool) -> Path:
    """A random llama of four layers with a tokenizer; `mixed`: down_proj in 8 bits, the rest of the layers in 4."""
    from mlx_lm.models.llama import Model, ModelArgs
    from mlx_lm.utils import save_model
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 32,
        "tie_word_embeddings": False,
    }
    mx.random.seed(3)
    model = Model(ModelArgs.from_dict(config))
    if mixed:
        eight = {"bits": 8, "group_size": 32}
        nn.quantize(
            model,
            group_size=32,
            bits=4,
            class_predicate=lambda path, m: (
                "layers" in path and hasattr(m, "to_quantized") and (eight if path.endswith("down_proj") else True)
            ),
        )
        by_path = {f"model.layers.{i}.mlp.down_proj": eight for i in range(4)}
        plain = {"lm_head": False, "model.embed_tokens": False}
        config["quantization"] = {"bits": 4, "group_size": 32, **by_path, **plain}
    save_model(folder, model)
    (folder / "config.json").write_text(json.dumps(config))
    words = {"<unk>": 0, **{f"w{i}": i for i in range(1, 32)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="w1").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("plain"), mixed=False)


@pytest.fixture(scope="module")
def mixed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("mixed"), mixed=True)


def constant(module: nn.Module) -> int:
    return 4


def by_bits(module: nn.Module) -> int:
    """max(2, ceil(8 * bits / 4)), on 4-bit modules halved so that the two differ."""
    return {4: 4, 8: 16}[module.bits]


def trained(
    folder: Path, rank_of: Callable[[nn.Module], int], wants: Callable[[str], bool]
) -> tuple[nn.Module, dict[str, mx.array]]:
    """The model with LoRA on the wanted linear modules, all of its tensors random, and those tensors."""
    from mlx_lm import load
    from mlx_lm.tuner.lora import LoRALinear

    model, _ = load(str(folder))
    model.freeze()
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.QuantizedLinear) and wants(path):
            lora = LoRALinear.from_base(module, r=rank_of(module), scale=SCALE)
            lora.lora_b = mx.random.normal(lora.lora_b.shape) * 0.1
            model.update_modules(tree_unflatten([(path, lora)]))
    tensors = {name: value for name, value in tree_flatten(model.parameters()) if name.endswith((".lora_a", ".lora_b"))}
    model.eval()
    return model, tensors


def logits_as_loaded_by_mlx_lm(folder: Path, adapter: Path) -> np.ndarray[Any, Any]:
    from mlx_lm import load

    model, _ = load(str(folder), adapter_path=str(adapter))
    return np.array(model(IDS))


def anywhere(path: str) -> bool:
    return ".layers." in path


@pytest.mark.parametrize(
    ("num_layers", "wants"),
    [
        (-1, anywhere),
        (2, lambda path: ".layers.2." in path or ".layers.3." in path),
        (-1, lambda path: path.endswith(("q_proj", "v_proj"))),
        (1, lambda path: path.endswith("layers.3.mlp.down_proj")),
        (-1, lambda path: path == "lm_head" or path.endswith("q_proj")),
    ],
    ids=["everywhere", "last_two_layers", "two_targets", "one_module", "outside_the_layers"],
)
def test_mlx_lm_loads_the_model_that_was_trained(
    plain_model: Path, tmp_path: Path, num_layers: int, wants: Callable[[str], bool]
) -> None:
    model, tensors = trained(plain_model, constant, wants)
    export_adapter(tmp_path, tensors, base_model=str(plain_model), num_layers=num_layers, scale=SCALE)
    loaded = logits_as_loaded_by_mlx_lm(plain_model, tmp_path)
    np.testing.assert_array_equal(loaded, np.array(model(IDS)))
    from mlx_lm import load

    bare, _ = load(str(plain_model))
    assert np.abs(loaded - np.array(bare(IDS))).max() > 1e-3  # the adapter does something


@pytest.mark.parametrize("num_layers", [-1, 2])
def test_ranks_that_differ_by_bits_change_nothing_for_mlx_lm(
    mixed_model: Path, tmp_path: Path, num_layers: int
) -> None:
    model, tensors = trained(
        mixed_model, by_bits, lambda path: any(f".layers.{i}." in path for i in range(4)[-max(num_layers, 0) :])
    )
    export_adapter(tmp_path, tensors, base_model=str(mixed_model), num_layers=num_layers, scale=SCALE)
    # Equal but for rounding: a BLAS sums a product over 4 and over 4 + 12 zeros in another order.
    loaded = logits_as_loaded_by_mlx_lm(mixed_model, tmp_path)
    np.testing.assert_allclose(loaded, np.array(model(IDS)), rtol=0, atol=2e-6)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["lora_parameters"]["rank"] == 16
    assert config["applied_ranks"]["model.layers.3.mlp.down_proj"] == 16
    assert config["applied_ranks"]["model.layers.3.self_attn.q_proj"] == 4


def test_what_was_exported_is_loaded_again_without_its_padding(mixed_model: Path, tmp_path: Path) -> None:
    _, tensors = trained(mixed_model, by_bits, anywhere)
    export_adapter(tmp_path, tensors, base_model="m", num_layers=-1, scale=SCALE, dropout=0.1)
    loaded, config = load_adapter(tmp_path)
    assert sorted(loaded) == sorted(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(loaded[name], np.array(tensor))
    assert applied_ranks({name: tensor.shape for name, tensor in loaded.items()}) == config["applied_ranks"]


def experts(rank: int) -> dict[str, np.ndarray[Any, Any]]:
    return {
        "model.layers.0.mlp.switch_mlp.up_proj.lora_a": np.ones((3, rank, 8), np.float32),
        "model.layers.0.mlp.switch_mlp.up_proj.lora_b": np.ones((3, 6, rank), np.float32),
    }


def linear(rank: int, layer: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    name = f"model.layers.{layer}.self_attn.q_proj"
    values = np.random.default_rng(layer)
    return {
        f"{name}.lora_a": values.normal(size=(8, rank)).astype(np.float32),
        f"{name}.lora_b": values.normal(size=(rank, 6)).astype(np.float32),
    }


def test_experts_are_padded_along_their_own_rank_axis(tmp_path: Path) -> None:
    tensors = experts(2) | linear(5)
    export_adapter(tmp_path, tensors, base_model="m", num_layers=-1, scale=1.0)
    stored = load_file(tmp_path / "adapters.safetensors")
    assert stored["model.layers.0.mlp.switch_mlp.up_proj.lora_a"].shape == (3, 5, 8)
    assert stored["model.layers.0.mlp.switch_mlp.up_proj.lora_b"].shape == (3, 6, 5)
    loaded, _ = load_adapter(tmp_path)
    assert {name: t.shape for name, t in loaded.items()} == {name: t.shape for name, t in tensors.items()}


def test_the_same_tensors_in_any_order_give_the_same_bytes(tmp_path: Path) -> None:
    tensors = linear(4, 0) | linear(2, 1) | linear(4, 10)
    sums = set()
    for place, names in enumerate([sorted(tensors), sorted(tensors, reverse=True)]):
        folder = tmp_path / str(place)
        as_given = {name: mx.array(tensors[name]) if place else tensors[name] for name in names}
        export_adapter(folder, as_given, base_model="m", num_layers=-1, scale=1.0)
        sums.add(hashlib.sha256((folder / "adapters.safetensors").read_bytes()).hexdigest())
    assert len(sums) == 1


def test_the_file_is_what_the_safetensors_library_reads(tmp_path: Path) -> None:
    tensors = linear(4, 0) | linear(4, 1)
    export_adapter(tmp_path, tensors, base_model="m", num_layers=-1, scale=1.0)
    stored = load_file(tmp_path / "adapters.safetensors")
    assert sorted(stored) == sorted(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(stored[name], tensor)
    assert "applied_ranks" not in json.loads((tmp_path / "adapter_config.json").read_text())


def test_keys_are_relative_inside_a_layer_and_whole_outside() -> None:
    modules = ["model.layers.0.self_attn.q_proj", "language_model.model.layers.11.mlp.up_proj", "lm_head"]
    assert module_keys(modules) == {"self_attn.q_proj", "mlp.up_proj", "lm_head"}


def test_zero_layers_are_not_written_because_mlx_lm_reads_them_as_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="-1 for all"):
        export_adapter(tmp_path, linear(2), base_model="m", num_layers=0, scale=1.0)


def test_an_adapter_in_half_precision_is_loaded_as_float32(tmp_path: Path) -> None:
    export_adapter(tmp_path, linear(2), base_model="m", num_layers=-1, scale=1.0)
    half = {name: mx.array(t).astype(mx.bfloat16) for name, t in linear(2).items()}
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), half)
    loaded, _ = load_adapter(tmp_path)
    assert {t.dtype for t in loaded.values()} == {np.dtype(np.float32)}


def test_a_folder_that_is_no_adapter_is_refused_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no readable adapter_config\.json"):
        load_adapter(tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        load_adapter(tmp_path)
    config.write_text('{"peft_type": "LORA", "r": 8}')
    with pytest.raises(UserError, match=r"has no adapter_model\.safetensors"):
        load_adapter(tmp_path)
    config.write_text('{"fine_tune_type": "dora", "lora_parameters": {}}')
    with pytest.raises(UserError, match="dora"):
        load_adapter(tmp_path)
    config.write_text('{"fine_tune_type": "lora", "lora_parameters": {}}')
    with pytest.raises(UserError, match=r"no adapters\.safetensors"):
        load_adapter(tmp_path)
    (tmp_path / "adapters.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match="cannot be read"):
        load_adapter(tmp_path)


@pytest.mark.parametrize("damage", TORN)
def test_a_torn_adapter_is_refused_before_its_tensors_are_read(damage: str, tmp_path: Path) -> None:
    export_adapter(tmp_path, linear(2), base_model="m", num_layers=-1, scale=1.0)
    (tmp_path / "adapters.safetensors").write_bytes(TORN[damage])
    with pytest.raises(UserError, match=r"adapters\.safetensors cannot be read \(.*\)\. Copy it again"):
        load_adapter(tmp_path)


@pytest.mark.parametrize(
    "ranks", [[], {"model.layers.0.self_attn.q_proj": "x"}, {"model.layers.0.self_attn.q_proj": []}]
)
def test_ranks_that_are_no_numbers_are_refused(ranks: object, tmp_path: Path) -> None:
    export_adapter(tmp_path, linear(2), base_model="m", num_layers=-1, scale=1.0)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "applied_ranks": ranks}))
    with pytest.raises(UserError, match="does not fit together"):
        load_adapter(tmp_path)


@pytest.mark.parametrize("damage", ["missing_half", "ranks_differ", "values_in_the_padding", "stranger"])
def test_tensors_that_do_not_fit_together_are_refused(tmp_path: Path, damage: str) -> None:
    export_adapter(tmp_path, linear(2, 0) | linear(4, 1), base_model="m", num_layers=-1, scale=1.0)
    stored = {name: mx.array(t) for name, t in load_file(tmp_path / "adapters.safetensors").items()}
    name = "model.layers.0.self_attn.q_proj.lora_b"
    if damage == "missing_half":
        del stored[name]
    elif damage == "ranks_differ":
        stored[name] = stored[name][:3]
    elif damage == "values_in_the_padding":
        stored[name] = stored[name] + 1
    else:
        stored["model.layers.0.self_attn.q_proj.m"] = mx.ones((6,))
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), stored)
    with pytest.raises(UserError, match=r"model\.layers\.0\.self_attn\.q_proj"):
        load_adapter(tmp_path)
