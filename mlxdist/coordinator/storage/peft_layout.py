"""The layout of Hugging Face's peft: its names, and the experts of a layer as one pair of matrices.

mlx-lm has gate_proj, up_proj and down_proj, each with lora_a [experts, r, in] and lora_b [experts, out, r].
transformers has the parameters gate_up_proj [experts, 2 * inner, in] and down_proj, and peft adapts each as a whole:
lora_A [r * experts, in], the ranks of one expert after those of the other, and lora_B [out, r * experts], the experts
of one rank side by side.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Tensor = npt.NDArray[np.float32]
Pair = tuple[Tensor, Tensor]  # lora_a [experts, r, in], lora_b [experts, out, r]

# Model types whose experts transformers keeps as these two parameters.
EXPERTS = frozenset({"mixtral", "olmoe", "qwen2_moe", "qwen3_moe"})
GATE_UP, DOWN = "gate_up_proj", "down_proj"

FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
INNER = "base_layer"  # of two adapted parameters of one module, the first stands at this name
A, B = ".lora_A.weight", ".lora_B.weight"


def packed(pair: Pair) -> Pair:
    """Returns peft's lora_A [r * experts, in] and lora_B [out, r * experts]."""
    a, b = pair
    experts, rank, inputs = a.shape
    return a.reshape(experts * rank, inputs), b.transpose(1, 2, 0).reshape(b.shape[1], rank * experts)


def unpacked(lora_a: Tensor, lora_b: Tensor, rank: int) -> Pair:
    """Returns mlx-lm's form of peft's two matrices. Raises ValueError where their sizes are not those of `rank`."""
    experts = lora_a.shape[0] // rank
    if experts * rank != lora_a.shape[0] or lora_b.shape[1] != lora_a.shape[0]:
        raise ValueError(f"matrices of {lora_a.shape} and {lora_b.shape} hold no experts of rank {rank}")
    a = lora_a.reshape(experts, rank, lora_a.shape[1])
    return a, lora_b.reshape(lora_b.shape[0], rank, experts).transpose(2, 0, 1)


def joined(gate: Pair | None, up: Pair | None) -> Pair:
    """Returns gate and up as one pair of twice the rank, in which neither touches the other's outputs.

    One that is None is not adapted; the other tells its shape. Raises ValueError for two Nones.
    """
    given = gate or up
    if given is None:
        raise ValueError("neither gate nor up is adapted")
    nothing: Pair = (given[0][:, :0], given[1][:, :, :0])
    (gate_a, gate_b), (up_a, up_b) = gate or nothing, up or nothing
    experts, inner, rank = gate_b.shape[0], given[1].shape[1], gate_b.shape[2]
    b = np.zeros((experts, 2 * inner, rank + up_b.shape[2]), np.float32)
    b[:, :inner, :rank], b[:, inner:, rank:] = gate_b, up_b
    return np.concatenate([gate_a, up_a], axis=1), b


def parted(pair: Pair) -> Mapping[str, Pair]:
    """Returns gate_proj and up_proj of a joined pair, each with the ranks that it uses; one that uses none is left out.

    An adapter of peft's own training uses all of its ranks for both.
    """
    a, b = pair
    inner = b.shape[1] // 2
    found = {}
    for name, rows in (("gate_proj", b[:, :inner]), ("up_proj", b[:, inner:])):
        used = np.flatnonzero(np.abs(rows).max(axis=(0, 1), initial=0.0))
        if len(used):
            kept = slice(int(used[0]), int(used[-1]) + 1)
            found[name] = (np.ascontiguousarray(a[:, kept]), np.ascontiguousarray(rows[:, :, kept]))
    return found
