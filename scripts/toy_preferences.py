"""Toy files for comparisons of preference training: a tiny random llama, a character tokenizer, rows, a first adapter.

Everything is small, float32 and drawn from a seed. Both mlx-lm and transformers can read the folder: `model/` with
config.json, model.safetensors and tokenizer files; `data/train.jsonl`; `adapter/` as mlx-lm writes adapters, lora_b 0.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,?!:+-=\n"
SPECIAL = ("<pad>", "<eos>", "<unk>")
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
HIDDEN, INNER, HEADS, KEY_VALUE_HEADS, LAYERS = 64, 96, 4, 2, 2
RANK, SCALE = 8, 2.0

Tensors = dict[str, np.ndarray]


def write_model(folder: Path, seed: int = 0) -> None:
    """Writes the model folder: random parameters, with log-probabilities that differ clearly between rows."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    vocabulary = len(SPECIAL) + len(LETTERS)
    tensors = {"model.norm.weight": np.ones(HIDDEN, np.float32)}
    for layer in range(LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = np.ones(HIDDEN, np.float32)
        for name, (inputs, outputs) in _linears().items():
            drawn = rng.standard_normal((outputs, inputs)) / np.sqrt(inputs)
            tensors[f"model.layers.{layer}.{name}.weight"] = drawn.astype(np.float32)
    tensors["model.embed_tokens.weight"] = rng.standard_normal((vocabulary, HIDDEN)).astype(np.float32)
    tensors["lm_head.weight"] = (rng.standard_normal((vocabulary, HIDDEN)) * 0.2).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "head_dim": HIDDEN // HEADS,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    _write_tokenizer(folder)


def write_adapter(folder: Path, seed: int = 1) -> None:
    """Writes the first adapter: lora_a uniform, lora_b 0, on every linear layer."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    for layer in range(LAYERS):
        for name, (inputs, outputs) in _linears().items():
            bound = 1 / np.sqrt(inputs)
            drawn = rng.uniform(-bound, bound, (inputs, RANK))
            tensors[f"model.layers.{layer}.{name}.lora_a"] = drawn.astype(np.float32)
            tensors[f"model.layers.{layer}.{name}.lora_b"] = np.zeros((RANK, outputs), np.float32)
    save_file(tensors, folder / "adapters.safetensors")
    parameters = {"rank": RANK, "scale": SCALE, "dropout": 0.0, "keys": sorted(_linears())}
    config = {"fine_tune_type": "lora", "num_layers": LAYERS, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


def write_rows(folder: Path, method: str, count: int, seed: int = 2) -> None:
    """Writes `train.jsonl`: chosen answers are lower-case, rejected ones upper-case, of 1 to 40 characters."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)

    def text(letters: str, shortest: int, longest: int) -> str:
        return "".join(letters[i] for i in rng.integers(0, len(letters), rng.integers(shortest, longest)))

    lower, upper = LETTERS[:26], LETTERS[26:52]
    with (folder / "train.jsonl").open("w") as file:
        for _ in range(count):
            prompt = text(lower + " ", 4, 40) + "? "
            chosen, rejected = text(lower, 1, 30), text(upper, 1, 30)
            row: dict[str, object] = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
            if method == "kto":
                desirable = bool(rng.integers(0, 2))
                row = {"prompt": prompt, "completion": chosen if desirable else rejected, "label": desirable}
            file.write(json.dumps(row) + "\n")


def _linears() -> dict[str, tuple[int, int]]:
    """Returns the numbers of inputs and outputs of the linear modules of a layer."""
    key_value = HIDDEN // HEADS * KEY_VALUE_HEADS
    shapes = ((HIDDEN, HIDDEN), (HIDDEN, key_value), (HIDDEN, key_value), (HIDDEN, HIDDEN))
    names = [f"self_attn.{name}" for name in MODULES[:4]] + [f"mlp.{name}" for name in MODULES[4:]]
    return dict(zip(names, (*shapes, (HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN)), strict=True))


def _write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer with one token per character, so that both trainers must see the same ids."""
    tokens = {token: i for i, token in enumerate((*SPECIAL, *LETTERS))}
    special = [
        dict(
            id=tokens[token],
            content=token,
            special=True,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        )
        for token in SPECIAL
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": tokens, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
