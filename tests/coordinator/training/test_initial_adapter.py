"""A run that starts from an earlier adapter starts from the model that was trained, or not at all."""

from pathlib import Path

import numpy as np
import pytest

from mlxdist.coordinator.export import export_adapter
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
