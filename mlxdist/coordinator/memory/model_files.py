"""Reads the sizes of a model from its files without loading its parameters: config.json and safetensors headers.

Names in the files may differ from those in mlx-lm's model, which renames and stacks experts. So the sizes are sums over
the names in the files.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from mlxdist.coordinator.config.schema import LoraConfig
from mlxdist.coordinator.storage.run_folder import read_json
from mlxdist.protocol.errors import ConfigError
from mlxdist.protocol.lora_targets import OTHER_SENSES, is_target
from mlxdist.protocol.ranks import Module, ranks

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(.+)\.weight$")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file: its type as safetensors names it, its shape and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's configuration and tensors. `tensors` is empty when only the configuration is on this machine."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """The bytes of all parameters."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def half(self) -> bool:
        """True when the model computes in 16 bits, as its norms or scales show."""
        return any(tensor.dtype in ("F16", "BF16") for tensor in self.tensors.values())


def find_model(model: str) -> Path | None:
    """Returns the folder of a model: `model` itself, or its place in the hub's cache; None when it is in neither."""
    if (Path(model) / "config.json").is_file():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def files_of(model: str) -> ModelFiles | None:
    """Returns the files of a model, by folder or hub id; None when they are not on this machine.

    Raises ConfigError for a file that cannot be read.
    """
    folder = find_model(model)
    return read_model(folder) if folder is not None else None


def read_model(folder: Path) -> ModelFiles:
    """Returns the configuration and the tensors in `folder`, without those for images.

    Opening a safetensors file compares its size, and the offsets of its tensors, with its header.

    Raises ConfigError for a file that cannot be read or is cut, and for one of several that is missing.
    """
    path, tensors = folder / "config.json", dict[str, Tensor]()
    try:
        config = read_json(path)
        for path in sorted(folder.glob("model*.safetensors")):
            tensors.update(_header(path))
        path = folder / "model.safetensors.index.json"
        if tensors and path.exists():
            _check_shards(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); fetch the model again") from error
    text = {name: tensor for name, tensor in tensors.items() if OTHER_SENSES.isdisjoint(name.split("."))}
    return ModelFiles(config, text)


def _check_shards(index: Path) -> None:
    """Raises ValueError where some files of the index are there, and others are not.

    A model that was converted may still have the index of the old one, of whose files none is there.
    """
    weights = read_json(index).get("weight_map")
    if not isinstance(weights, dict):
        raise ValueError("it has no weight_map")
    names = {str(name) for name in weights.values()}
    missing = sorted(name for name in names if not (index.parent / name).is_file())
    if missing and len(missing) < len(names):
        raise ValueError(f"it names {missing[0]}, which is missing")


def _header(path: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118  # the file is not a mapping
            view = file.get_slice(name)
            dtype, shape = view.get_dtype(), tuple(view.get_shape())
            yield name, Tensor(dtype, shape, math.prod(shape) * _bits(dtype) // 8)


def _bits(dtype: str) -> int:
    """Returns the bits of one element: the first number in the type's name, as in "BF16" and "F8_E4M3"."""
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 8  # "BOOL"


def adapter_elements(files: ModelFiles, lora: LoraConfig) -> int:
    """Returns the number of trainable parameters of a LoRA adapter on this model; ranks by_kl count as by_bits."""
    targets = lora.target_modules
    modules, sizes = _targets(files, [targets] if isinstance(targets, str) else targets)
    layers = 1 + max((layer for layer, _ in sizes.values()), default=-1)
    first = 0 if lora.num_layers < 0 else layers - lora.num_layers
    rank_of = ranks(modules, lora.rank, lora.rank_scaling, {})
    return sum(rank_of[path] * features for path, (layer, features) in sizes.items() if layer >= first)


def _targets(files: ModelFiles, names: Sequence[str]) -> tuple[list[Module], dict[str, tuple[int, int]]]:
    """Returns the target modules, and for each its layer and its features: the parameters of one rank."""
    group = _quantization(files.config).get("group_size", 64)
    modules, sizes = [], {}
    for name, tensor in files.tensors.items():
        found = LAYER.search(name)
        if found is None or len(tensor.shape) < 2 or not any(is_target(found[2], one) for one in names):
            continue
        path, (*experts, outputs, inputs) = name.removesuffix(".weight"), tensor.shape
        bits = 0
        if (scales := files.tensors.get(f"{path}.scales")) is not None:
            own = _quantization(files.config).get(path)
            width = scales.shape[-1] * (own.get("group_size", group) if isinstance(own, dict) else group)
            bits, inputs = inputs * 32 // width, width
        modules.append(Module(path, found[2], bits))
        sizes[path] = (int(found[1]), (experts[0] if experts else 1) * (outputs + inputs))
    return modules, sizes


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("quantization") or config.get("quantization_config") or {}
    return found if isinstance(found, dict) else {}
