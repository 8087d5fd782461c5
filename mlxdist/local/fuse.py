"""Fusing: the adapter becomes part of the base model's own matrices, by mlx-lm's layers, and its cost is measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from mlxdist.coordinator.batch.row_store import StoredRows
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.local.losses import LocalFleet, LocalLosses
from mlxdist.node.work.compute import Computer
from mlxdist.protocol.vectors import Vector

SHARE_OF_GAIN = 0.1  # of what training gained: a greater loss by fusing is warned of …
LEAST = 0.005  # … when it is also more than this, in nats


@dataclass(frozen=True)
class FusedLosses:
    """Validation losses around a fusing, in nats. `requantized`: of the base model fused with an adapter of zeros."""

    base: float
    adapter: float
    fused: float
    requantized: float | None  # None where nothing was quantized again

    @property
    def costs_much(self) -> bool:
        """True where fusing loses a good part of what the training gained."""
        return self.fused - self.adapter > max(SHARE_OF_GAIN * abs(self.base - self.adapter), LEAST)

    def sentence(self) -> str:
        """Returns the losses in one sentence, with a warning where fusing costs much."""
        said = (
            f"validation loss {self.adapter:.4f} with the adapter and {self.fused:.4f} fused "
            f"(base model {self.base:.4f}"
        )
        if self.requantized is not None:
            said += f"; quantizing again changes the base model alone by {self.requantized - self.base:+.4f}"
        said += ")"
        if self.costs_much:
            cure = "" if self.requantized is None else ": --dequantize keeps it"
            said += f"; warning: fusing loses {self.fused - self.adapter:.4f} of what training gained{cure}"
        return said


def fuse(
    computer: Computer,
    adapter: Vector,
    config: RunConfig,
    rows: StoredRows | None,
    *,
    dequantize: bool,
    told: Callable[[str], None] = lambda stage: None,
) -> FusedLosses | None:
    """Fuses `adapter` into the model of `computer`, which has no LoRA layers afterwards.

    Returns the losses on `rows`; None without any. `told` is called with what comes next.
    """
    model, layers = computer.loaded.model, lora_layers(computer.loaded.model)
    if rows is None:
        computer.use(adapter)
        _fuse_layers(model, layers, dequantize=dequantize)
        return None
    computer = replace(computer, adapter=adapter)
    losses = LocalLosses(config, rows, LocalFleet(computer))
    nothing = np.zeros_like(adapter)
    told("scoring the validation rows with the base model and with the adapter")
    computer.use(adapter)
    with_adapter = losses.loss()  # the first: it also computes the reference's log-probs
    computer.use(nothing)
    base, requantized = losses.loss(), None
    if is_quantized(layers) and not dequantize:
        told("scoring them with the base model, quantized again")
        _fuse_layers(model, layers, dequantize=False)
        requantized = losses.loss()
        model.update_modules(tree_unflatten(list(layers)))
    computer.use(adapter)
    told("scoring them with the fused model")
    _fuse_layers(model, layers, dequantize=dequantize)
    return FusedLosses(base, with_adapter, losses.loss(), requantized)


def lora_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Returns the LoRA layers of a model by path."""
    return [(path, module) for path, module in model.named_modules() if "lora_b" in module]


def is_quantized(layers: Sequence[tuple[str, Any]]) -> bool:
    """Returns true where one of the layers stands on a quantized one."""
    return any("scales" in (getattr(layer, "linear", None) or ()) for _, layer in layers)


def save_fused(model: nn.Module, tokenizer: Any, base: Path, folder: Path, *, dequantize: bool) -> None:
    """Writes the fused model as mlx_lm.load takes it, with its tokenizer and chat template; `base`: its origin."""
    from mlx_lm.utils import dequantize_model, load_config, save

    config = load_config(base)
    if dequantize:
        model = dequantize_model(model)
        config = {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}
    model.eval()
    save(folder, base, model, tokenizer, config, donate_model=False)
    (folder / "adapter_config.json").unlink(missing_ok=True)  # with it, mlx-lm and others look for an adapter


def _fuse_layers(model: nn.Module, layers: Sequence[tuple[str, Any]], *, dequantize: bool) -> None:
    model.update_modules(tree_unflatten([(path, layer.fuse(dequantize=dequantize)) for path, layer in layers]))
    mx.eval(model.parameters())
