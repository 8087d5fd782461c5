"""A real byte-level BPE tokenizer with a chat template, trained on a few lines, saved as a folder without a model."""

import json
from pathlib import Path
from typing import Any

CHAT = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
LINES = ["the quick brown fox jumps over the lazy dog", "question and answer", "שלום עולם", "🐎 the horse", "aaaa bbbb"]


def save_tokenizer(folder: Path, *, chat_template: str | None = CHAT, bos: bool = False) -> Path:
    """The folder of a tokenizer; with `bos` it puts <s> in front when asked for special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|start|>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES * 4, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    wrapped: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|end|>", chat_template=chat_template
    )
    wrapped.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": [0, 3]}))
    return folder
