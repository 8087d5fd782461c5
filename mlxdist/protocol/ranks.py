"""The rank of each LoRA layer: the same for all, by the bits of the layer, or by its measured sensitivity."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Module:
    """A module that gets a LoRA layer: its path in the model and in its layer, its bits (0: not quantized)."""

    path: str
    layer_path: str
    bits: int


def rank_by_bits(lora_rank: int, bits: int) -> int:
    """Returns max(2, ceil(r * bits / 4)); a layer that is not quantized gets r."""
    return lora_rank if bits == 0 else max(2, math.ceil(lora_rank * bits / 4))


def ranks(modules: Sequence[Module], lora_rank: int, scaling: str, kl: Mapping[str, float]) -> dict[str, int]:
    """Returns each module's rank by its path. `scaling`: constant | by_bits | by_kl; `kl` maps paths to sensitivity.

    by_kl: max(2, ceil(r * clip(kl / median, 0.5, 2))) with the upper median over the whole map. A module that
    the map lacks, or every module when there is no map, gets its rank by its bits.
    """
    if scaling == "constant":
        return {module.path: lora_rank for module in modules}
    if scaling == "by_bits" or not kl:
        return {module.path: rank_by_bits(lora_rank, module.bits) for module in modules}
    median = sorted(kl.values())[len(kl) // 2]

    def rank(module: Module) -> int:
        if module.path not in kl or median <= 0:
            return rank_by_bits(lora_rank, module.bits)
        return max(2, math.ceil(lora_rank * min(max(kl[module.path] / median, 0.5), 2.0)))

    return {module.path: rank(module) for module in modules}
