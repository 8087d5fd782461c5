"""Run folders with an adapter of random values, as a training would leave them, made without training."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.utils import load_model

from mlxdist.coordinator.config.keys import build
from mlxdist.coordinator.config.schema import as_json
from mlxdist.coordinator.export import export_adapter
from mlxdist.coordinator.storage.run_folder import RunFolder, write_json
from mlxdist.protocol.methods import METHODS
from tests.laws import plain_model


def made_run(
    path: Path, model: Path, *, method: str = "sft", size: float = 0.3, rank: int = 4, **settings: Any
) -> RunFolder:
    """A finished run of 5 steps with one adapter; `settings` by dotted key, with __ for the dot."""
    run = RunFolder(path)
    path.mkdir(parents=True)
    given = {key.replace("__", "."): value for key, value in settings.items()}
    values = {"model": str(model), "output": path, "data.path": "none", "method": method, **METHODS[method].defaults}
    values |= {"lora.rank": rank, "lora.scale": 2.0, "memory.segment_size": "off", "memory.head_chunk": 64, **given}
    config = build(values)
    write_json(run.config, as_json(config))
    write_json(run.manifest, {"version": 1, "base_model": str(model), "method": method, "created_at": "2026-01-01"})
    run.metrics_json.write_text(json.dumps({"steps": 5}))
    export_adapter(path, random_adapter(model, rank, size), base_model=str(model), num_layers=-1, scale=2.0)
    return run


def random_adapter(model: Path, rank: int, size: float) -> Mapping[str, np.ndarray[Any, Any]]:
    """Tensors for every linear layer of a model's layers; of `size` 0 they change nothing."""
    plain = plain_model.with_lora(load_model(model)[0], rank=rank, scale=2.0)
    random = np.random.default_rng(7)
    return {
        name: (random.standard_normal(tensor.shape) * size).astype(np.float32)
        for name, tensor in sorted(plain_model.adapter_of(plain).items())
    }
