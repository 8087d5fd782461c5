"""The model as mlx-lm would load it, with no parameter read: its size, its LoRA targets, and runs that it refuses.

mlx-lm's lazy loading makes the modules and leaves every tensor in its file. So names, shapes and bits are those that a
node will have, whatever mlx-lm renames, stacks, drops or quantizes on the way.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxdist.coordinator.config.schema import LoraConfig
from mlxdist.coordinator.memory.prediction import ADAPTER_BYTES
from mlxdist.protocol.errors import ConfigError
from mlxdist.protocol.lora_targets import (
    ALL_LINEAR,
    is_target,
    layers_of,
    linear_modules,
    refuse_other_senses,
    target_modules,
)
from mlxdist.protocol.ranks import ranks

# Layers that mlx-lm trains token by token, by module and class; nothing here replaces them.
TOKEN_BY_TOKEN = frozenset(
    {
        ("bailing_moe_linear", "LinearAttention"),
        ("jamba", "JambaMambaMixer"),
        ("mamba", "MambaBlock"),
        ("recurrent_gemma", "RGLRU"),
        ("rwkv7", "Rwkv7TimeMixing"),
    }
)


class UnloadableError(ConfigError):
    """A model that mlx-lm does not load."""


@dataclass(frozen=True, slots=True)
class ModelTree:
    """A model that was loaded without its parameters."""

    nbytes: int  # of all parameters
    half: bool  # activations have 16 bits
    elements: int  # trainable parameters of the adapter
    note: str  # on targets that reach only a part of the layers, or every expert; "" for others
    slow: str = ""  # on layers that are trained token by token; "" for others


def read_tree(folder: Path, name: str, lora: LoraConfig) -> ModelTree:
    """The model in `folder`, called `name` in messages, under the LoRA layers of a run.

    Raises ConfigError for a run that a node would refuse: a model that cannot be loaded (UnloadableError), one with an
    encoder for images, targets that it does not have.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten

    model = _loaded(folder, name)
    refuse_other_senses(model, name)
    tensors: list[Any] = [pair[1] for pair in tree_flatten(model.parameters())]
    half = any(tensor.dtype in (mx.float16, mx.bfloat16) for tensor in tensors)
    names: list[str] = [lora.target_modules] if isinstance(lora.target_modules, str) else list(lora.target_modules)
    return ModelTree(
        nbytes=sum(tensor.nbytes for tensor in tensors),
        half=half,
        elements=_elements(model, names, lora),
        note=_note(model, names, lora),
        slow=_slow(model),
    )


def _loaded(folder: Path, name: str) -> Any:
    from mlx_lm.utils import load_model

    try:
        return load_model(folder, lazy=True)[0]
    except Exception as error:  # a model's own code raises what it likes
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnloadableError(f"model {name!r} cannot be loaded: {first}") from error


def _elements(model: Any, names: list[str], lora: LoraConfig) -> int:
    """The trainable parameters of an adapter on these targets; ranks by_kl are counted as by_bits."""
    modules = target_modules(model, names, lora.num_layers, _kinds())
    rank_of = ranks(modules, lora.rank, lora.rank_scaling, {})
    found = dict(model.named_modules())
    return sum(rank_of[module.path] * _features(found[module.path]) for module in modules)


def _note(model: Any, names: list[str], lora: LoraConfig) -> str:
    """The sentence on targets that leave layers out, or that are the experts of a mixture, and the setting for it."""
    if names == [ALL_LINEAR]:
        return ""
    layers, kinds = layers_of(model), _kinds()
    layers = layers if lora.num_layers < 0 else layers[max(len(layers) - lora.num_layers, 0) :]
    linear = [dict(linear_modules(layer, kinds)) for layer in layers]
    hit = [{path: each for path, each in found.items() if _is_hit(path, names)} for found in linear]
    others = sum(_of_another_kind(linear, names))
    experts = max((_copies(each) for found in hit for each in found.values()), default=1)
    if not others and experts == 1:
        return ""
    share = sum(map(_weights, hit)) / max(sum(map(_weights, linear)), 1)
    each = f", each of {experts} experts among them" if experts > 1 else ""
    said = (
        f"lora.target_modules are in {len(layers) - others} of {len(layers)} layers{' only' if others else ''} and "
        f"hold {share:.0%} of the parameters of the linear modules{each}: the adapter has "
        f"{_size(_elements(model, names, lora))}, sent to every node and back in each step"
    )
    if others:
        everything = _size(_elements(model, [ALL_LINEAR], lora))
        said += f'; lora.target_modules = "{ALL_LINEAR}" reaches all layers with {everything}'
    copied = [path for found in hit for path, module in found.items() if _copies(module) > 1]
    single = [name for name in names if not any(is_target(path, name) for path in copied)]
    if experts > 1 and single:
        quoted = ", ".join(f'"{name}"' for name in single)
        without = _size(_elements(model, single, lora))
        said += f"; lora.target_modules = [{quoted}] leaves the experts out and has {without}"
    return said


def _slow(model: Any) -> str:
    """The sentence on layers that mlx-lm trains token by token, with the time and memory that this takes."""
    kinds = [(type(module).__module__.rpartition(".")[2], type(module).__name__) for module in model.modules()]
    found = [kind for kind in kinds if kind in TOKEN_BY_TOKEN]
    if not found:
        return ""
    names = ", ".join(sorted({name for _, name in found}))
    return (
        f"mlx-lm trains {len(found)} layers of this model ({names}) token by token, and keeps a state for each token: "
        "a step is many times slower than that of a transformer of this size, and long rows need far more memory than "
        "is predicted; short rows (batch.max_length) and segments (memory.segment_size = 1) help most"
    )


def _of_another_kind(layers: list[dict[str, Any]], names: list[str]) -> list[bool]:
    """True for each layer that lacks a target and has other modules in its place, as the layers of a hybrid do."""
    lacking = [any(not any(is_target(path, name) for path in layer) for name in names) for layer in layers]
    usual = {_last(path) for layer, lacks in zip(layers, lacking, strict=True) if not lacks for path in layer}
    strange = [any(_last(path) not in usual and not _is_hit(path, names) for path in layer) for layer in layers]
    return [lacks and other for lacks, other in zip(lacking, strange, strict=True)]


def _is_hit(path: str, names: list[str]) -> bool:
    return any(is_target(path, name) for name in names)


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _kinds() -> tuple[type, ...]:
    """The classes that mlx-lm has LoRA layers for."""
    import mlx.nn as nn
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    return nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear


def _shape(module: Any) -> tuple[int, ...]:
    """The shape of a module's weight as if it were not quantized: [out, in], or [experts, out, in]."""
    *front, inputs = module.weight.shape
    return (*front, inputs * 32 // module.bits if hasattr(module, "bits") else inputs)


def _features(module: Any) -> int:
    """The parameters of one rank of the module's LoRA layer: inputs and outputs, for each expert."""
    *experts, outputs, inputs = _shape(module)
    return math.prod(experts) * (outputs + inputs)


def _copies(module: Any) -> int:
    return math.prod(_shape(module)[:-2])


def _weights(modules: dict[str, Any]) -> int:
    return sum(math.prod(_shape(module)) for module in modules.values())


def _size(elements: int) -> str:
    return f"{elements:,} parameters ({ADAPTER_BYTES * elements / 1e6:.3g} MB)"
