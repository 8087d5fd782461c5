"""The modules of a loaded model that get LoRA layers. Both sides ask here, so that they accept the same runs."""

from collections.abc import Iterator, Sequence

import mlx.nn as nn

from mlxdist.protocol.errors import ConfigError
from mlxdist.protocol.ranks import Module

ALL_LINEAR = "all-linear"  # every linear module of the layers, as PEFT calls it
# Modules whose own code reads their matrix, which a LoRA layer around them would hide: trained only when named.
NOT_BY_ALL = frozenset({"prediction_coefs", "correction_coefs", "res_proj"})
# Modules of encoders for images or sound, by the names that mlx-lm's and Hugging Face's models have.
OTHER_SENSES = frozenset(
    {"vision", "vision_tower", "vision_model", "vision_encoder", "visual", "audio_tower", "audio_encoder"}
)


def target_modules(model: nn.Module, names: Sequence[str], num_layers: int, kinds: tuple[type, ...]) -> list[Module]:
    """The modules of the last `num_layers` layers (-1: all) whose last or dotted name is a target, sorted by path.

    `kinds`: the classes that have a LoRA layer, which only mlx-lm knows. Raises ConfigError for a target that occurs in
    no layer, naming the modules that there are.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    layers = layers_of(model)
    chosen = layers if num_layers < 0 else layers[max(len(layers) - num_layers, 0) :]
    found: dict[str, Module] = {}
    missing, present = set(names) - {ALL_LINEAR}, set()
    for layer in layers:
        for path, module in linear_modules(layer, kinds):
            present.add(path.rsplit(".", 1)[-1])
            hits = {name for name in names if is_target(path, name)}
            missing -= hits
            if hits and any(layer is one for one in chosen):
                full = paths[id(module)]
                found[full] = Module(full, path, int(getattr(module, "bits", 0)))
    if missing:
        raise ConfigError(
            f"lora.target_modules: no layer of this model has {', '.join(sorted(missing))}; "
            f'its layers have {", ".join(sorted(present))} ("{ALL_LINEAR}" takes them all)'
        )
    if not found:
        raise ConfigError(
            f"lora.num_layers = {num_layers}: the last layers of this model have none of {', '.join(names)}; raise "
            f'it, or set lora.target_modules = "{ALL_LINEAR}"'
        )
    return [found[path] for path in sorted(found)]


def is_target(path: str, name: str) -> bool:
    """True where a module at `path` in its layer is meant by `name`: its last name, its dotted end, or all."""
    if name == ALL_LINEAR:
        return path.rsplit(".", 1)[-1] not in NOT_BY_ALL
    return name == path or path.endswith(f".{name}")


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The model's layers; a part of a model that is spread over machines has None for the others."""
    return [layer for layer in model.layers if layer is not None]


def linear_modules(layer: nn.Module, kinds: tuple[type, ...]) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a layer that can get a LoRA layer, with their paths in it."""
    yield from (
        (path, module)
        for path, module in layer.named_modules()
        if isinstance(module, kinds) or hasattr(module, "to_lora")
    )


def refuse_other_senses(model: nn.Module, name: str) -> None:
    """Raises ConfigError for a loaded model with an encoder for images or sound, which no row here can reach."""
    for path, _ in model.named_modules():
        if OTHER_SENSES & set(path.split(".")):
            raise ConfigError(
                f"model {name!r} has a vision or audio tower ({path}), and only text is trained: make a copy without "
                f'it, mlx_lm.convert --hf-path {name} --mlx-path text-only, and give model = "text-only"'
            )
