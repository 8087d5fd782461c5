"""Tiny random models of every architecture that mlx-lm has, with LoRA layers on them.

`COMMON` has the sizes under all names that architectures use; each architecture takes the names it knows. `SPECIAL` has
what one architecture needs in addition. Used by the tests and by scripts/check_architectures.py.
"""

import importlib
import importlib.util
import pathlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

VOCABULARY = 96
LAYERS = 4

COMMON: dict[str, Any] = {
    # sizes
    "vocab_size": VOCABULARY,
    "num_vocab": VOCABULARY,
    "hidden_size": 32,
    "d_model": 32,
    "model_dim": 32,
    "n_embd": 32,
    "block_dim": 32,
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "num_transformer_layers": LAYERS,
    "intermediate_size": 48,
    "hidden_dim": 48,
    "ffn_hidden_size": 48,
    "ff_intermediate_size": 48,
    "dense_intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "n_inner": 48,
    "max_position_embeddings": 256,
    "original_max_position_embeddings": 256,
    "model_max_length": 256,
    "n_positions": 256,
    "n_ctx": 256,
    "block_size": 256,
    # attention
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "n_kv_heads": 2,
    "num_attention_groups": 2,
    "num_swa_attention_heads": 4,
    "num_swa_key_value_heads": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "head_dim": 8,
    "swa_head_dim": 8,
    "swa_v_head_dim": 8,
    "global_head_dim": 8,
    "kv_channels": 8,
    "rotary_dim": 8,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "swa_rope_theta": 10000.0,
    "rope_local_base_freq": 10000.0,
    "attention_bias": False,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "qk_norm": True,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "sliding_window_pattern": 2,
    "attention_window_size": 8,
    "window_size": 8,
    "full_attention_interval": 2,
    "layer_group_size": 2,
    "group_norm_size": 2,
    # norms, heads and scalings
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "post_norm_eps": 1e-5,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "dim_model_base": 16,
    "scale_depth": 1.4,
    "scale_emb": 3,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_shared_expert": 1,
    "moe_intermediate_size": 16,
    "moe_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "share_expert_dim": 16,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "zero_expert_num": 1,
    "zero_expert_type": "identity",
    # latent attention and its index
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "o_lora_rank": 16,
    "o_groups": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 8,
    # state spaces and linear attention
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
    "short_conv_kernel_size": 4,
    "state_size": 8,
    "ssm_state_size": 8,
    "conv_kernel": 4,
    "conv1d_width": 4,
    "conv_window": 2,
    "conv_L_cache": 3,
    "conv_bias": False,
    "use_conv_bias": True,
    "n_groups": 1,
    "time_step_rank": 4,
    "time_step_limit": [0.0, 100.0],
    "mamba_num_heads": 4,
    "mamba_n_heads": 4,
    "mamba_head_dim": 8,
    "mamba_d_head": 8,
    "mamba_d_ssm": 32,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "mamba_n_groups": 1,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}

FULL_AND_SLIDING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
YARN = {
    "type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
ROPE_BY_KIND = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in FULL_AND_SLIDING}
GEMMA3N = {
    "model_type": "gemma3n_text",
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "final_logit_softcapping": 30.0,
    "layer_types": FULL_AND_SLIDING,
    "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    "hidden_size_per_layer_input": 8,
    "altup_num_inputs": 4,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
}
GEMMA4 = {
    "model_type": "gemma4_text",
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "layer_types": FULL_AND_SLIDING,
}
KIMI_LINEAR = {
    "linear_attn_config": {
        "kda_layers": [1, 3],
        "full_attn_layers": [2, 4],
        "num_heads": 4,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
    }
}
LFM2 = {
    "layer_types": ["conv", "full_attention"] * (LAYERS // 2),
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "use_expert_bias": True,
    "num_dense_layers": 1,
}
LLAMA4 = {
    "num_experts_per_tok": 1,
    "model_type": "llama4_text",
    "no_rope_layers": [1, 0, 1, 0],
    "attention_chunk_size": 8,
    "interleave_moe_layer_step": 2,
    "rope_scaling": None,
}
LATENT_MOE = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1, "rope_parameters": YARN}

SPECIAL: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "afmoe": {"layer_types": FULL_AND_SLIDING},
    "apertus": {"post_norm": True},
    "baichuan_m1": {"sliding_window_layers": [1, 3]},
    "bailing_moe_v3": {"n_group": 2},
    "cohere": {"num_key_value_heads": 4},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": YARN, "topk_method": "greedy", "scoring_func": "softmax"},
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LG"},
    "exaone_moe": {"layer_types": FULL_AND_SLIDING, "is_moe_layer": [False, True, True, True]},
    "gear": {"layer_types": FULL_AND_SLIDING},
    "gemma3": {"text_config": {"model_type": "gemma3_text"}},
    "gemma3n": {"text_config": GEMMA3N},
    "gemma4": {"text_config": GEMMA4},
    "gemma4_text": GEMMA4,
    "glm4_moe": {"rope_scaling": None},
    "glm_moe_dsa": LATENT_MOE,
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gpt_oss": {"layer_types": FULL_AND_SLIDING},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * (LAYERS // 2)},
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1.0},
    },
    "hunyuan_v1_dense": {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1.0}},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
    "kimi_k25": {"text_config": {"model_type": "deepseek_v3"}},
    "kimi_k3": {
        "text_config": {
            **KIMI_LINEAR,
            "attn_res_block_size": 2,
            "routed_expert_hidden_size": 16,
            "activation_situ_beta": 1.0,
            "activation_situ_linear_beta": 1.0,
        }
    },
    "kimi_linear": KIMI_LINEAR,
    "kimi_vl": {"text_config": {"model_type": "deepseek_v3"}},
    "lfm2": LFM2,
    "lfm2-vl": {"text_config": {"model_type": "lfm2", **LFM2}},
    "lfm2_moe": LFM2,
    "lille-130m": {"n_embd": 128},
    "llama": {"layer_types": FULL_AND_SLIDING},
    "llama4": {"text_config": LLAMA4},
    "llama4_text": LLAMA4,
    "longcat_flash": {"attention_method": "MLA"},
    "mellum": {"layer_types": FULL_AND_SLIDING, "rope_parameters": ROPE_BY_KIND},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    },
    "minicpm3": {"rope_scaling": {}},
    "minimax_m3_vl": {"text_config": {"moe_layer_freq": [0, 1, 1, 1]}},
    "ministral3": {"rope_parameters": YARN, "layer_types": FULL_AND_SLIDING},
    "mistral3": {"text_config": {"model_type": "ministral3", "rope_parameters": YARN}},
    "mistral4": {"rope_parameters": YARN},
    "muse_spark": {
        "text_config": {
            "rope_parameters": {"rope_theta": 10000.0},
            "layer_rope_theta": [10000.0, 0.0, 10000.0, 0.0],
            "layer_types": FULL_AND_SLIDING,
            "final_logit_softcapping": 30.0,
            "output_multiplier": 0.5,
            "num_shared_experts": 0,
        }
    },
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"replace_with_linear": True}, "ffn": {"replace_with_linear": True}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}},
        ]
    },
    "nemotron_h": {"hybrid_override_pattern": ["M", "*", "-", "E"]},
    "olmo3": {"layer_types": FULL_AND_SLIDING},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2)},
    "openelm": {
        "ffn_dim_divisor": 8,
        "num_query_heads": [4] * LAYERS,
        "num_kv_heads": [2] * LAYERS,
        "ffn_multipliers": [1.0, 1.5, 2.0, 2.0],
    },
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 2,
        "blocksparse_vert_stride": 2,
    },
    "pixtral": {"text_config": {"model_type": "llama"}},
    "plamo": {"n_shared_head": 2},
    "qwen": {"intermediate_size": 96},
    "qwen3_vl_moe": {"text_config": {"model_type": "qwen3_moe"}},
    "recurrent_gemma": {
        "logits_soft_cap": 30.0,
        "block_types": ["recurrent", "attention"] * (LAYERS // 2),
    },
    "rwkv7": {"a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8},
    "spark2_5": {"layer_types": FULL_AND_SLIDING, "rope_parameters": ROPE_BY_KIND},
}


def architectures() -> Iterator[str]:
    """Yields the names of the modules of `mlx_lm.models` that define a model, sorted."""
    import mlx_lm.models

    for found in sorted(pkgutil.iter_modules(mlx_lm.models.__path__), key=lambda found: found.name):
        source = importlib.util.find_spec(f"mlx_lm.models.{found.name}")
        text = pathlib.Path(str(source and source.origin)).read_text()
        if "\nclass Model(" in text:
            yield found.name


def tiny_config(architecture: str, **changes: Any) -> dict[str, Any]:
    """Returns the configuration of a tiny model of `architecture`: all sizes under all their names."""
    values = {**COMMON, "model_type": architecture.replace("-", "_"), **SPECIAL.get(architecture, {}), **changes}
    if "text_config" in values:
        values["text_config"] = {**COMMON, **values["text_config"], **changes}
    return values


def tiny_model(architecture: str, *, seed: int = 1, **changes: Any) -> nn.Module:
    """Makes a random float32 model of `architecture`, frozen, in training mode."""
    return model_of(architecture, tiny_config(architecture, **changes), seed=seed)


def model_of(architecture: str, values: dict[str, Any], *, seed: int = 1) -> nn.Module:
    """Makes the same from a complete configuration."""
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    mx.random.seed(seed)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(values))
    model.update(tree_unflatten(_drawn_apart(tree_flatten(model.parameters()))))
    model.freeze()
    model.train()
    return model


def _drawn_apart(parameters: list[tuple[str, mx.array]]) -> list[tuple[str, mx.array]]:
    """Returns the values in float32, none exactly 0 or 1, where some gradients are NaN and others tell nothing."""
    return [
        (name, value.astype(mx.float32) + 0.02 * mx.random.normal(value.shape))
        for name, value in parameters
        if mx.issubdtype(value.dtype, mx.floating)
    ]


# Modules whose own code reads their matrix; a LoRA layer around them would hide it.
NOT_FOR_LORA = ("prediction_coefs", "correction_coefs", "res_proj")


def add_lora(model: nn.Module, *, layers: int = -1, rank: int = 4, dropout: float = 0.0, seed: int = 2) -> list[str]:
    """Adds LoRA, B not zero, to all linear modules of the last `layers` layers (-1: all). Returns trainable names."""
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
    from mlx_lm.tuner.utils import linear_to_lora_layers

    kinds = (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear)
    chosen = [layer for layer in model.layers if layer is not None]
    chosen = chosen if layers < 0 else chosen[len(chosen) - layers :]
    keys = {
        path
        for layer in chosen
        for path, module in layer.named_modules()
        if isinstance(module, kinds) and not path.endswith(NOT_FOR_LORA)
    }
    linear_to_lora_layers(model, len(chosen), {"rank": rank, "scale": 2.0, "dropout": dropout, "keys": keys})
    values = dict(tree_flatten(model.trainable_parameters()))
    draws = mx.random.split(mx.random.key(seed), max(len(values), 1))
    drawn = [
        (name, 0.1 * mx.random.normal(value.shape, key=key))
        for (name, value), key in zip(values.items(), draws, strict=False)
    ]
    model.update(tree_unflatten(drawn))
    mx.eval(model.parameters())
    return [name for name, _ in drawn]
