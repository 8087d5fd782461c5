"""The small models of the self-check. numpy draws every number in them, so that they are the same everywhere."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlxdist.node.backward.parameters import trainable
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol import numerics
from mlxdist.protocol.leaves import Leaf

VOCABULARY = 96
TOKENS = 48
GROUP = 32  # of quantization
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TINY: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    }
)


@dataclass(frozen=True)
class Case:
    """A model, made when it is needed, and the rows of its leaf."""

    make: Callable[[], nn.Module]
    rows: int = 1

    def leaf(self) -> Leaf:
        """Returns a leaf of the canary's rows."""
        both = numerics.canary_leaf(VOCABULARY, TOKENS)
        return Leaf(0, both.rows[: self.rows])


def dense(**sizes: Any) -> nn.Module:
    """Makes a llama with LoRA layers."""
    from mlx_lm.models import llama

    config = {**TINY, "model_type": "llama", **sizes}
    return with_lora(drawn(llama.Model(llama.ModelArgs.from_dict(config))))


def mixture() -> nn.Module:
    """Makes a qwen3_moe of four experts, two of them for each token."""
    from mlx_lm.models import qwen3_moe

    config = {
        **TINY,
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
    }
    return with_lora(drawn(qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(config))))


def four_bits() -> nn.Module:
    """Makes the llama with its layers in four bits; the packed numbers are drawn, as machines may round differently."""
    from mlx_lm.models import llama

    model = llama.Model(llama.ModelArgs.from_dict({**TINY, "model_type": "llama"}))
    nn.quantize(
        model,
        group_size=GROUP,
        bits=4,
        class_predicate=lambda path, module: "layers" in path and hasattr(module, "to_quantized"),
    )
    return with_lora(drawn(model))


def half() -> nn.Module:
    """Makes a llama in bfloat16, of half the size: processors without this type are slow."""
    from mlx_lm.models import llama

    sizes = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
    model = drawn(llama.Model(llama.ModelArgs.from_dict({**TINY, "model_type": "llama", **sizes})))
    model.set_dtype(mx.bfloat16)
    return with_lora(model)


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "dense": Case(dense),
        "packed": Case(dense, rows=2),
        "MoE": Case(mixture),
        "4-bit": Case(four_bits),
        "bf16": Case(half),
    }
)


def drawn(model: nn.Module) -> nn.Module:
    """Draws all matrices of the model from one seed. Returns the model."""
    random = np.random.Generator(np.random.PCG64(7))
    values: list[tuple[str, mx.array]] = []
    for name, old in sorted(dict(tree_flatten(model.parameters())).items()):
        kind = name.rpartition(".")[2]
        if old.dtype == mx.uint32:
            new = random.integers(0, 2**32, old.shape, dtype=np.uint32)
        elif kind == "scales":
            new = (random.random(old.shape, dtype=np.float32) + 0.5) * 0.02
        elif kind == "biases":  # centers the four bits
            new = np.full(old.shape, -0.15, np.float32)
        elif old.ndim > 1:
            new = (random.random(old.shape, dtype=np.float32) - 0.5) * np.float32(4 / np.sqrt(old.shape[-1]))
        else:
            continue
        values.append((name, mx.array(new)))
    model.update(tree_unflatten(values))
    return model


def with_lora(model: nn.Module) -> nn.Module:
    """Adds LoRA layers of rank 4 to all linear layers, with the canary's adapter. Returns the model."""
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model.freeze()
    layer = model.layers[0]
    keys = [path for path, _ in layer.named_modules() if path.rpartition(".")[2] in TARGETS]
    linear_to_lora_layers(model, len(model.layers), {"rank": 4, "scale": 1.0, "dropout": 0.0, "keys": keys})
    manifest = manifests.make({name: tuple(value.shape) for name, value in trainable(model).items()})
    parts = manifests.split(manifest, numerics.canary_adapter(manifest))
    model.update(tree_unflatten([(name, mx.array(part)) for name, part in parts.items()]))
    mx.eval(model.parameters())
    return model
