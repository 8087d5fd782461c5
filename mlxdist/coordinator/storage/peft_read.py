"""An adapter in the layout of Hugging Face's peft, read as one of ours."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from mlxdist.coordinator.storage.peft_layout import DOWN, GATE_UP, INNER, PREFIX, A, B, Pair, Tensor, parted, unpacked

REFUSED = (
    ("use_dora", "DoRA, which is another method than LoRA"),
    ("modules_to_save", "whole modules that were trained beside LoRA (modules_to_save)"),
    ("lora_bias", "biases of LoRA (lora_bias)"),
    ("trainable_token_indices", "embeddings of single tokens (trainable_token_indices)"),
)


def is_peft(config: Mapping[str, Any]) -> bool:
    """Returns true for the content of an adapter_config.json that peft has written."""
    return "peft_type" in config


def from_peft(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> tuple[dict[str, Tensor], float]:
    """Returns an adapter's tensors under our names and in our layout, and the factor on their product.

    The factor is lora_alpha over r (with rsLoRA over its root); modules with another one have it in their lora_b.
    Raises ValueError, with the reason as a clause, for what is not LoRA alone.
    """
    if config.get("peft_type") != "LORA":
        raise ValueError(f"it is of peft's type {config.get('peft_type')}, and only LORA can be started from")
    for key, what in REFUSED:
        if config.get(key):
            raise ValueError(f"it has {what}, and only LoRA can be started from")
    if config.get("bias", "none") != "none":
        raise ValueError(f"it has trained biases (bias = {config['bias']!r}), and only LoRA can be started from")
    found: dict[str, Pair] = {}
    scales: dict[str, float] = {}
    for module, (lora_a, lora_b) in _pairs(tensors).items():
        place = module.removesuffix(f".{INNER}")
        if place.endswith(".experts"):
            parts, scale = _experts(config, place, (lora_a, lora_b), inner=module != place)
        else:
            rank, scale = _rank_and_scale(config, module)
            if lora_a.shape[0] != rank:
                raise ValueError(f"{module} has rank {lora_a.shape[0]}, and its configuration says {rank}")
            parts = {module: (lora_a.T, lora_b.T)}
        found |= parts
        scales |= dict.fromkeys(parts, scale)
    usual = Counter(scales.values()).most_common(1)[0][0]
    ours: dict[str, Tensor] = {}
    for module, (a, b) in sorted(found.items()):
        factor = np.float32(scales[module] / usual)
        ours |= {f"{module}.lora_a": np.ascontiguousarray(a), f"{module}.lora_b": np.ascontiguousarray(b * factor)}
    return ours, usual


def _experts(config: Mapping[str, Any], place: str, matrices: Pair, *, inner: bool) -> tuple[dict[str, Pair], float]:
    """Returns what adapts the projections of the experts at `place`, by our names, and their scale.

    The parameter of a matrix is told by its place where two are adapted, else by the configuration.
    """
    down = any(f"{place}.{DOWN}".endswith(name) for name in config.get("target_parameters") or ())
    parameter = DOWN if down and not inner else GATE_UP
    rank, scale = _rank_and_scale(config, f"{place}.{parameter}")
    pair = unpacked(*matrices, rank)
    parts = {DOWN: pair} if parameter == DOWN else parted(pair)
    return {f"{place.removesuffix('experts')}switch_mlp.{name}": part for name, part in parts.items()}, scale


def _pairs(tensors: Mapping[str, Tensor]) -> dict[str, Pair]:
    """Returns lora_A and lora_B by module, without peft's prefix. Raises ValueError for any other tensor."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        ending = next((ending for ending in (A, B) if name.endswith(ending)), None)
        if ending is None or not name.startswith(PREFIX) or tensor.ndim != 2:
            raise ValueError(f"it holds {name}, which is no matrix of LoRA")
        found.setdefault(name.removeprefix(PREFIX).removesuffix(ending), {})[ending] = tensor
    for module, both in found.items():
        if len(both) != 2:
            raise ValueError(f"{module} lacks {(A if A not in both else B)[1:]}")
    if not found:
        raise ValueError("it holds no tensor")
    return {module: (both[A], both[B]) for module, both in found.items()}


def _rank_and_scale(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    rank = _by_pattern(config.get("rank_pattern"), module, config["r"])
    alpha = _by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
    return int(rank), float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(pattern: Mapping[str, Any] | None, module: str, usual: Any) -> Any:
    """Returns the value of the first key that matches the module's name or its end, as peft reads these keys."""
    for key, value in (pattern or {}).items():
        if re.fullmatch(rf"(.*\.)?({key})", module):
            return value
    return usual
