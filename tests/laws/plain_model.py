"""A tiny llama in memory, float32, with mlx-lm's LoRA layers; and rows of very different lengths for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models import llama
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers

Ids = tuple[int, ...]
Adapter = dict[str, mx.array]

VOCABULARY = 61
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class PlainRow:
    """Token ids, and 1 where a token is predicted and counted."""

    ids: Ids
    targets: tuple[int, ...]


@dataclass(frozen=True)
class KtoRow:
    """Prompt and completion before any cut, because the KL pairs are cut again."""

    prompt: Ids
    completion: Ids
    desirable: bool


def joined(prompt: Ids, completion: Ids) -> PlainRow:
    """The row whose targets are the completion's tokens."""
    return PlainRow(prompt + completion, (0,) * len(prompt) + (1,) * len(completion))


def tiny_llama(seed: int = 0, scale: float = 0.3) -> nn.Module:
    """A random model, the same for the same seed; `scale` makes its predictions far from uniform."""
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    rng = np.random.default_rng(seed)
    shapes = tree_map(lambda a: a.shape, model.parameters())
    drawn = tree_map(
        lambda a: (
            mx.array((rng.standard_normal(a.shape) * scale).astype(np.float32)) if a.ndim > 1 else mx.ones(a.shape)
        ),
        model.parameters(),
    )
    model.update(drawn)
    assert tree_map(lambda a: a.shape, model.parameters()) == shapes
    return model


def with_lora(model: nn.Module, *, rank: int = 4, scale: float = 2.0, seed: int = 1, fresh: bool = True) -> nn.Module:
    """The same model with LoRA on every linear layer; lora_b is 0 when `fresh`, else small and random."""
    model.freeze()
    keys = {name for name, _ in model.layers[0].named_modules() if name.split(".")[-1] in MODULES}
    linear_to_lora_layers(model, len(model.layers), {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys})
    rng = np.random.default_rng(seed)
    drawn = {}
    for name, value in sorted(adapter_of(model).items()):
        spread = 1 / np.sqrt(value.shape[0]) if name.endswith("lora_a") else (0.0 if fresh else 0.02)
        drawn[name] = mx.array(rng.uniform(-spread, spread, value.shape).astype(np.float32))
    use_adapter(model, drawn)
    assert all(name.endswith(("lora_a", "lora_b")) for name, _ in tree_flatten(model.trainable_parameters()))
    return model


def random_ids(rng: np.random.Generator, count: int) -> Ids:
    """So many tokens of the vocabulary."""
    return tuple(int(i) for i in rng.integers(0, VOCABULARY, count))


def sft_steps(seed: int = 0, steps: int = 5, size: int = 6) -> list[list[PlainRow]]:
    """Steps of rows of very different lengths, one of each all prompt but one token."""
    rng = np.random.default_rng(seed)

    def row(prompt: int, completion: int) -> PlainRow:
        return joined(random_ids(rng, prompt), random_ids(rng, completion))

    return [[row(23, 1)] + [row(*rng.integers(1, 40, 2)) for _ in range(size - 1)] for _ in range(steps)]


def dpo_steps(seed: int = 0, steps: int = 5, size: int = 4) -> list[list[tuple[PlainRow, PlainRow]]]:
    """Steps of pairs (chosen, rejected) that share their prompt."""
    rng = np.random.default_rng(seed)

    def pair() -> tuple[PlainRow, PlainRow]:
        prompt, chosen, rejected = (random_ids(rng, count) for count in rng.integers(1, 24, 3))
        return joined(prompt, chosen), joined(prompt, rejected)

    return [[pair() for _ in range(size)] for _ in range(steps)]


def kto_steps(seed: int = 0, labels: Sequence[Sequence[int]] = ()) -> list[list[KtoRow]]:
    """Steps of labeled rows: mixed, odd in size, of one class, of two rows; or with the labels given."""
    rng = np.random.default_rng(seed)
    labels = labels or ((1, 0, 1, 1, 0), (0, 0, 1), (1, 1, 1, 1), (0, 0), (1, 0, 0, 1, 0, 1))

    def row(label: int) -> KtoRow:
        prompt, completion = (random_ids(rng, count) for count in rng.integers(1, 24, 2))
        return KtoRow(prompt, completion, bool(label))

    return [[row(label) for label in step] for step in labels]


def set_dropout(model: nn.Module, p: float) -> None:
    """Give every LoRA layer this dropout."""
    for module in model.modules():
        if isinstance(module, LoRALinear):
            module.dropout = nn.Dropout(p)


def adapter_of(model: nn.Module) -> Adapter:
    """The trainable tensors by name."""
    return dict(tree_flatten(model.trainable_parameters()))


def use_adapter(model: nn.Module, adapter: Mapping[str, mx.array]) -> None:
    """Put an adapter's tensors into the model."""
    model.update(tree_unflatten(list(adapter.items())))
