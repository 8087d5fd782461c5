"""Model folders as mlx_lm.load takes them: a tiny random llama, float32 or mixed 4/8-bit, with a tokenizer."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models import llama
from mlx_lm.utils import save_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 96
WORDS = ("<unk>", "<end>", "<user>", "<assistant>", *(f"w{i}" for i in range(VOCABULARY - 4)))
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def llama_folder(
    folder: Path, *, mixed: bool = False, layers: int = 2, seed: int = 3, vocabulary: int = VOCABULARY
) -> Path:
    """Write a random llama. `mixed`: down_proj in 8 bits, the other linear layers in 4, float32 scales.

    `vocabulary`: rows of the embedding, also more than there are words, for a larger model.
    """
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 64 if mixed else 32,
        "num_hidden_layers": layers,
        "intermediate_size": 96 if mixed else 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
    }
    model = llama.Model(llama.ModelArgs.from_dict(config))
    random = np.random.default_rng(seed)

    def drawn(array: mx.array) -> mx.array:
        return mx.array((random.standard_normal(array.shape) * 0.2).astype(np.float32)) if array.ndim > 1 else array

    model.update(tree_map(drawn, model.parameters()))
    if mixed:
        eight = {"bits": 8, "group_size": 32}

        def bits(path: str, module: nn.Module) -> bool | dict[str, int]:
            if "layers" not in path or not hasattr(module, "to_quantized"):
                return False
            return eight if path.endswith("down_proj") else True

        nn.quantize(model, group_size=32, bits=4, class_predicate=bits)
        plain = {"lm_head": False, "model.embed_tokens": False}
        by_path = {f"model.layers.{layer}.mlp.down_proj": eight for layer in range(layers)}
        config["quantization"] = {"bits": 4, "group_size": 32, **by_path, **plain}
    save_model(folder, model)
    (folder / "config.json").write_text(json.dumps(config))
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<end>", pad_token="<end>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder
