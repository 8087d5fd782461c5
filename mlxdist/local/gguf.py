"""GGUF by mlx-lm's own writer, for the models and tokenizers that it knows."""

import contextlib
import io
from pathlib import Path
from typing import Any

from mlxdist.protocol.errors import UserError

MODELS = ("llama", "mistral", "mixtral")
FILE = "model-f16.gguf"


def refuse_unknown(config: dict[str, Any], tokenizer: dict[str, Any], run: Path) -> None:
    """Raises UserError for a model or a tokenizer that mlx-lm's writer cannot write rightly, naming the other way.

    `config`: of the base model. `tokenizer`: its tokenizer.json. The writer notes every tokenizer as one of
    SentencePiece; another kind would be read wrongly by every program.
    """
    kind = (tokenizer.get("model") or {}).get("type", "unknown")
    fallback = bool((tokenizer.get("model") or {}).get("byte_fallback"))
    if config.get("model_type") in MODELS and fallback:
        return
    what = (
        f"models of type {config.get('model_type')}"
        if config.get("model_type") not in MODELS
        else f"this tokenizer (kind {kind}, not SentencePiece)"
    )
    raise UserError(
        f"mlx-lm's GGUF writer does not know {what}. Use llama.cpp's converters: mlxdist export {run} OUT --peft, then "
        "convert_lora_to_gguf.py OUT for the adapter beside a GGUF of the base; or mlxdist export with --fuse "
        "--dequantize, then convert_hf_to_gguf.py OUT for the whole model"
    )


def write_gguf(model: Any, config: dict[str, Any], tokenizer: Path, file: Path) -> None:
    """Writes a model without quantization as one GGUF file in half precision; `tokenizer`: the folder of its files."""
    from mlx.utils import tree_flatten
    from mlx_lm.gguf import convert_to_gguf

    parameters = dict(tree_flatten(model.parameters()))
    with contextlib.redirect_stdout(io.StringIO()):  # it prints
        convert_to_gguf(tokenizer, parameters, config, str(file))
