"""The small models of the self-check. numpy draws every number in them, so that they are the same everywhere."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlxdist.node.backward.backward import WHOLE, GradientPath
from mlxdist.node.backward.parameters import trainable
from mlxdist.node.selfcheck.rows import pairs_leaf, rows_leaf
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol import numerics
from mlxdist.protocol.leaves import Leaf

VOCABULARY = 96
TOKENS = 48
GROUP = 32  # of quantization
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "in_proj_qkv", "out_proj")
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
    """A model, made when it is needed, the leaf that it trains on, and the path of its gradient."""

    make: Callable[[], nn.Module]
    leaf: Callable[[], Leaf]
    path: GradientPath = WHOLE


def canary_rows(count: int) -> Leaf:
    """Returns a leaf of the first rows of the canary."""
    return Leaf(0, numerics.canary_leaf(VOCABULARY, TOKENS).rows[:count])


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


def hybrid(**sizes: Any) -> nn.Module:
    """Makes a qwen3_5 of four layers: three with gated-delta attention, one with full attention."""
    from mlx_lm.models import qwen3_5

    config = {
        **TINY,
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "max_position_embeddings": 4096,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "num_experts": 0,
        **sizes,
    }
    mx.random.seed(7)  # of the gates, which are no matrices
    return with_lora(drawn(qwen3_5.Model(qwen3_5.ModelArgs(model_type="qwen3_5", text_config=config))))


def half() -> nn.Module:
    """Makes a llama in bfloat16, of half the size: processors without this type are slow."""
    from mlx_lm.models import llama

    sizes = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
    model = drawn(llama.Model(llama.ModelArgs.from_dict({**TINY, "model_type": "llama", **sizes})))
    model.set_dtype(mx.bfloat16)
    return with_lora(model)


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "dense": Case(dense, partial(canary_rows, 1)),
        "packed": Case(dense, partial(canary_rows, 2)),
        "MoE": Case(mixture, partial(canary_rows, 1)),
        "4-bit": Case(four_bits, partial(canary_rows, 1)),
        "bf16": Case(half, partial(canary_rows, 1)),
    }
)

# Heads and lengths for which Metal has other kernels than for tiny ones.
LARGER: Mapping[str, Case] = MappingProxyType(
    {
        "long": Case(partial(dense, head_dim=64), partial(rows_leaf, [301], VOCABULARY)),
        "pairs": Case(partial(dense, head_dim=64), partial(pairs_leaf, 2, 70, 33, VOCABULARY)),
        "hybrid": Case(hybrid, partial(rows_leaf, [150], VOCABULARY), GradientPath(chunked=True)),
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
    paths = [path for layer in model.layers for path, _ in layer.named_modules()]
    keys = [path for path in dict.fromkeys(paths) if path.rpartition(".")[2] in TARGETS]
    linear_to_lora_layers(model, len(model.layers), {"rank": 4, "scale": 1.0, "dropout": 0.0, "keys": keys})
    manifest = manifests.make({name: tuple(value.shape) for name, value in trainable(model).items()})
    parts = manifests.split(manifest, numerics.canary_adapter(manifest))
    model.update(tree_unflatten([(name, mx.array(part)) for name, part in parts.items()]))
    mx.eval(model.parameters())
    return model
