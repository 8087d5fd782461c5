"""The model with its LoRA layers, as mlx-lm loads it; only lora_a and lora_b can be trained."""

import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxdist.node.backward.backward import GradientPath
from mlxdist.node.backward.choose_packing import TINY, PackingChoice, choose_packing
from mlxdist.node.backward.choose_path import choose_path
from mlxdist.node.backward.parameters import trainable
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol.errors import ConfigError, MismatchError
from mlxdist.protocol.lora_targets import refuse_other_senses, target_modules
from mlxdist.protocol.manifest import Manifest
from mlxdist.protocol.messages import RunSpec
from mlxdist.protocol.ranks import ranks
from mlxdist.protocol.untrusted import CODE_FILES, model_name, refuse_own_code

SAMPLE_BYTES = 1 << 20
SAMPLES = 64


@dataclass(frozen=True)
class LoadedModel:
    """A model with its LoRA layers, ready to train."""

    model: nn.Module
    path: GradientPath
    packing: PackingChoice  # the best that the model allows
    manifest: Manifest
    model_hash: str
    vocab_size: int

    def use(self, adapter: Mapping[str, mx.array]) -> None:
        """Puts the adapter's tensors, by manifest name, into the LoRA layers."""
        self.model.update(tree_unflatten(list(adapter.items())))


@dataclass(frozen=True)
class OpenedModel:
    """A model as mlx-lm loads it, without LoRA layers."""

    model: nn.Module
    folder: Path
    vocab_size: int


def open_model(spec: RunSpec, *, lazy: bool = False) -> OpenedModel:
    """Loads the run's model with mlx-lm (a folder or hub id, quantized or not).

    `lazy`: a parameter is read from the disk when it is first used.

    Raises ConfigError for a model that cannot be loaded, brings code of its own or has an encoder for images or sound.
    """
    from mlx_lm.utils import _download, load_model

    try:
        folder = _download(model_name(spec.model))
        files = [folder / name for name in CODE_FILES]
        refuse_own_code(spec.model, {file.name: json.loads(file.read_text()) for file in files if file.is_file()})
        model, config = load_model(folder, lazy=lazy)
    except ConfigError:
        raise
    except Exception as error:  # a model's own code raises what it likes
        raise ConfigError(f"model {spec.model!r} cannot be loaded: {error}") from error
    refuse_other_senses(model, spec.model)
    return OpenedModel(model, folder, _vocab_size(model, config))


def add_lora(opened: OpenedModel, spec: RunSpec, progress: Callable[[str], None]) -> None:
    """Adds the run's LoRA layers, each of its own rank. Raises ConfigError for targets that the model does not have."""
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    kinds = (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear)
    modules = target_modules(opened.model, spec.target_modules, spec.num_layers, kinds)
    kl = _kl_map(opened.folder)
    if spec.rank_scaling == "by_kl" and not kl:
        progress("optiq_metadata.json with KL values is not beside the model: ranks go by bits")
    apply_lora(opened.model, ranks(modules, spec.lora_rank, spec.rank_scaling, kl), spec)


def load_with_lora(spec: RunSpec, progress: Callable[[str], None]) -> LoadedModel:
    """Loads the run's model and adds the LoRA layers.

    Raises ConfigError as `open_model` and `add_lora`, MismatchError when other parameters than LoRA tensors would be
    trained.
    """
    progress(f"loading {spec.model}")
    opened = open_model(spec)
    progress("hashing the model's files")
    model, model_hash = opened.model, hash_model(opened.folder)
    add_lora(opened, spec, progress)
    shapes = {name: tuple(tensor.shape) for name, tensor in trainable(model).items()}
    mx.eval(model.parameters())
    progress("checking the backward on a tiny batch")
    path = choose_path(
        model, segment_size=spec.segment_size, grad_checkpoint=spec.grad_checkpoint, chunked=spec.chunked
    )
    if path.reason:
        progress(path.reason)
    packing = _packing(model, path, spec, progress)
    return LoadedModel(
        model=model,
        path=path,
        packing=packing,
        manifest=manifests.make(shapes),
        model_hash=model_hash,
        vocab_size=opened.vocab_size,
    )


def packed_again(loaded: LoadedModel, spec: RunSpec, progress: Callable[[str], None]) -> LoadedModel:
    """Returns a loaded model with the choice of its packing made again, for a run that asks for another mode."""
    return replace(loaded, packing=_packing(loaded.model, loaded.path, spec, progress))


def _packing(model: nn.Module, path: GradientPath, spec: RunSpec, progress: Callable[[str], None]) -> PackingChoice:
    progress(f"comparing packed rows with rows alone, at up to {max(spec.largest_leaf, TINY)} tokens")
    packing = choose_packing(model, path, tokens=spec.largest_leaf, best=spec.packing)
    if packing.reason:
        progress(packing.reason)
    return packing


def apply_lora(model: nn.Module, rank_of: Mapping[str, int], spec: RunSpec) -> None:
    """Freezes the model and wraps each module in mlx-lm's LoRA layer of its own rank."""
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model.freeze()
    for rank in sorted(set(rank_of.values())):
        keys = {path for path, wanted in rank_of.items() if wanted == rank}
        parameters = {"rank": rank, "scale": spec.lora_scale, "dropout": spec.lora_dropout, "keys": keys}
        linear_to_lora_layers(model, 1, parameters)
    names = list(trainable(model))
    strangers = [name for name in names if name.rsplit(".", 1)[-1] not in ("lora_a", "lora_b")]
    if strangers or not names:
        raise MismatchError(f"only LoRA tensors may be trained, but the model also trains {strangers[:3]}")


def hash_model(folder: Path) -> str:
    """Returns the SHA-256 in hex of config.json and, per safetensors file, its name, header, size and 64 samples."""
    total = hashlib.sha256()
    total.update((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("model*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            (header_size,) = struct.unpack("<Q", file.read(8))
            total.update(f"{path.name}:{size}:".encode() + file.read(min(header_size, size)))
            stride = max(size // SAMPLES, SAMPLE_BYTES)
            for start in range(0, size, stride):
                file.seek(start)
                total.update(file.read(SAMPLE_BYTES))
    return total.hexdigest()


def _kl_map(folder: Path) -> dict[str, float]:
    """Returns the sensitivity by module path from optiq_metadata.json (`per_layer`, or `optimization.per_layer`)."""
    path = folder / "optiq_metadata.json"
    if not path.exists():
        return {}
    document = json.loads(path.read_text())
    per_layer = document.get("per_layer") or document.get("optimization", {}).get("per_layer", {})
    entries = {name: entry["kl"] for name, entry in per_layer.items() if isinstance(entry, dict) and "kl" in entry}
    return {name.removeprefix("language_model."): float(kl) for name, kl in entries.items()}


def _vocab_size(model: nn.Module, config: dict[str, Any]) -> int:
    return int(config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or model.args.vocab_size)
