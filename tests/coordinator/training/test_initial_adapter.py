"""A run that starts from an earlier adapter starts from the model that was trained, or not at all."""

from pathlib import Path

import numpy as np
import pytest

from mlxdist.coordinator.export import export_adapter
from mlxdist.coordinator.storage.peft_files import write_peft
from mlxdist.coordinator.training.initial_adapter import start_from
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol.errors import ConfigError

TENSORS = {
    "layers.0.q_proj.lora_a": np.arange(8, dtype=np.float32).reshape(4, 2),
    "layers.0.q_proj.lora_b": np.arange(6, dtype=np.float32).reshape(2, 3),
}


def test_an_adapter_of_another_scale_is_refused_with_the_scale_it_was_trained_with(tmp_path: Path) -> None:
    export_adapter(tmp_path, TENSORS, base_model="m", num_layers=-1, scale=4.0)
    manifest = manifests.make({name: tensor.shape for name, tensor in TENSORS.items()})
    expected = manifests.join(manifest, TENSORS)
    assert np.array_equal(start_from(tmp_path, manifest, 4.0), expected)
    with pytest.raises(
        ConfigError, match=r"was trained with scale 4\.0, and lora\.scale is 1\.0.*set lora\.scale = 4\.0"
    ):
        start_from(tmp_path, manifest, 1.0)


def test_a_peft_folder_is_a_start_with_its_tensors_and_its_scale(tmp_path: Path) -> None:
    """Mixtral's experts have another name in transformers than here."""
    random = np.random.default_rng(3)
    switch = "model.layers.0.block_sparse_moe.switch_mlp.down_proj"
    shapes = {
        "model.layers.0.self_attn.q_proj.lora_a": (6, 4),
        "model.layers.0.self_attn.q_proj.lora_b": (4, 5),
        f"{switch}.lora_a": (3, 4, 6),
        f"{switch}.lora_b": (3, 5, 4),
    }
    tensors = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    write_peft(tmp_path, tensors, scale=2.0, base_model="base", model_type="mixtral")
    manifest = manifests.make(shapes)
    vector = start_from(tmp_path, manifest, 2.0)
    np.testing.assert_array_equal(vector, manifests.join(manifest, tensors))
    with pytest.raises(ConfigError, match=r"set lora\.scale = 2\.0"):
        start_from(tmp_path, manifest, 1.0)
