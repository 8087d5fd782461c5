"""An export is whole or not there, and other programs give the same numbers with it."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from mlxdist.coordinator.config.saved import saved_config
from mlxdist.coordinator.storage.adapter_files import load_adapter
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.local.export import Wanted, export
from mlxdist.local.fuse import FusedLosses
from mlxdist.local.gguf import refuse_unknown
from mlxdist.protocol.errors import UserError
from tests.laws.model_folder import llama_folder
from tests.local.made_runs import made_run

IDS = [[5, 9, 12, 40, 3, 77, 8]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rows = [{"prompt": f"w{n} w6", "completion": " w7 w8" + f" w{n + 9}" * n} for n in range(1, 6)]
    for name in ("train", "valid"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in 4 and 8 bits."""
    return llama_folder(tmp_path_factory.mktemp("mixed"), mixed=True)


def logits(model: Path, adapter: Path | None = None) -> np.ndarray[Any, Any]:
    loaded, *_ = mlx_lm.load(str(model), adapter_path=str(adapter) if adapter else None)
    return np.array(loaded(mx.array(IDS)).astype(mx.float32))


def test_an_adapter_is_copied_with_its_origin(model: Path, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", model)
    made = export(run.path, tmp_path / "out", Wanted())
    for name in ("adapters.safetensors", "adapter_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (run.path / name).read_bytes()
    origin = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (origin["base_model"], origin["step"], origin["form"]) == (str(model), 5, "adapter")
    assert made.adapter.step == 5
    np.testing.assert_array_equal(logits(model, tmp_path / "out"), logits(model, run.path))


def test_a_fused_model_answers_as_base_and_adapter_and_says_its_losses(model: Path, data: Path, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", model, data__path=str(data))
    made = export(run.path, tmp_path / "out", Wanted("fused"))
    np.testing.assert_allclose(logits(tmp_path / "out"), logits(model, run.path), rtol=1e-4, atol=1e-4)
    assert "validation loss" in made.sentences[-2]
    assert "warning" not in made.sentences[-2]
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    _, tokenizer, *_ = mlx_lm.load(str(tmp_path / "out"))
    assert "<assistant>" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "w5"}], add_generation_prompt=True, tokenize=False
    )


def test_fusing_into_few_bits_is_measured_and_dequantize_keeps_the_model(
    mixed: Path, data: Path, tmp_path: Path
) -> None:
    run = made_run(tmp_path / "run", mixed, data__path=str(data), size=0.02, lora__rank_scaling="constant")
    quantized = export(run.path, tmp_path / "bits", Wanted("fused")).sentences[-2]
    assert "quantizing again changes the base model alone by" in quantized
    config = json.loads((tmp_path / "bits" / "config.json").read_text())
    assert config["quantization"] == json.loads((mixed / "config.json").read_text())["quantization"]
    wanted = logits(mixed, run.path)
    lost = np.abs(logits(tmp_path / "bits") - wanted).max()

    whole = export(run.path, tmp_path / "whole", Wanted("fused", dequantize=True)).sentences[-2]
    assert "quantizing again" not in whole
    assert "quantization" not in json.loads((tmp_path / "whole" / "config.json").read_text())
    kept = np.abs(logits(tmp_path / "whole") - wanted).max()
    assert kept < 1e-3 < lost


@pytest.mark.parametrize(("method", "loss"), [("dpo", "sigmoid"), ("kto", "kto")])
def test_the_losses_of_preferences_have_the_reference_of_the_base_model(
    method: str, loss: str, model: Path, tmp_path: Path
) -> None:
    pairs = [{"prompt": "w5 w6", "chosen": f" w{n}", "rejected": f" w{n + 1} w7"} for n in range(8, 12)]
    labeled = [{"prompt": f"w{n} w6", "completion": f" w{n}", "label": n % 2 == 0} for n in range(8, 12)]
    for name in ("train", "valid"):
        rows = pairs if method == "dpo" else labeled
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = made_run(tmp_path / "run", model, method=method, data__path=str(tmp_path), preference__loss=loss)
    said = export(run.path, tmp_path / "out", Wanted("fused")).sentences[-2]
    base = 0.6931 if method == "dpo" else 0.5
    adapter, fused = (float(said.split(word)[0].split()[-1]) for word in (" with the adapter", " fused"))
    assert f"base model {base:.4f}" in said
    assert adapter == pytest.approx(fused, abs=2e-4)
    assert abs(adapter - base) > 0.01


def test_a_run_without_validation_rows_is_fused_and_it_says_so(model: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "w1 w2"}\n' * 9)
    run = made_run(tmp_path / "run", model, data__path=str(tmp_path))
    made = export(run.path, tmp_path / "out", Wanted("fused"))
    assert "not judged" in made.sentences[0]
    np.testing.assert_allclose(logits(tmp_path / "out"), logits(model, run.path), rtol=1e-4, atol=1e-4)


def test_a_costly_fusing_is_warned_of() -> None:
    assert "--dequantize" in FusedLosses(3.0, 2.0, 2.2, 3.05).sentence()
    assert "warning" not in FusedLosses(3.0, 2.0, 2.05, 3.05).sentence()
    assert "warning" not in FusedLosses(3.0, 2.999, 3.0, 3.0).sentence()  # within the noise of a short training


def test_the_peft_folder_holds_the_same_adapter(model: Path, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", model)
    export(run.path, tmp_path / "out", Wanted("peft"))
    ours, _ = load_adapter(run.path)
    theirs, config = load_adapter(tmp_path / "out")
    assert config["lora_parameters"] == {"scale": 2.0}
    for name, tensor in ours.items():
        np.testing.assert_array_equal(theirs[name], tensor)


def test_a_folder_with_content_stays_and_a_failure_leaves_nothing(model: Path, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", model)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(UserError, match="not empty"):
        export(run.path, tmp_path / "out", Wanted())
    RunFolder(run.path).adapters.write_bytes(b"damaged")
    with pytest.raises(UserError, match="cannot be read"):
        export(run.path, tmp_path / "new", Wanted("peft"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    assert saved_config(run).model == str(model)


def test_a_gguf_is_refused_where_the_writer_would_write_a_wrong_one(model: Path, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", model)
    with pytest.raises(UserError, match=r"kind WordLevel, not SentencePiece.*convert_lora_to_gguf\.py"):
        export(run.path, tmp_path / "out", Wanted("gguf"))
    spm = {"model": {"type": "BPE", "byte_fallback": True}}
    refuse_unknown({"model_type": "llama"}, spm, run.path)
    with pytest.raises(UserError, match="models of type qwen3"):
        refuse_unknown({"model_type": "qwen3"}, spm, run.path)
    with pytest.raises(UserError, match="kind BPE"):
        refuse_unknown({"model_type": "llama"}, {"model": {"type": "BPE"}}, run.path)


def test_a_gguf_holds_the_fused_matrices(tmp_path: Path) -> None:
    """Of a llama with a SentencePiece-like tokenizer, as mlx itself reads the file."""
    model = llama_folder(tmp_path / "model")
    words = ["<unk>", "<s>", "</s>", "\u2581", *(chr(ord("a") + n) for n in range(26))]
    vocabulary = {word: place for place, word in enumerate(words + [f"x{n}" for n in range(96 - len(words))])}
    pieces = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pieces, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = None
    tokenizer.save_pretrained(model)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / "train.jsonl").write_text('{"text": "abc def"}\n' * 9)
    run = made_run(tmp_path / "run", model, data__path=str(tmp_path))
    export(run.path, tmp_path / "out", Wanted("gguf"))
    tensors, facts = mx.load(str(tmp_path / "out" / "model-f16.gguf"), return_metadata=True)  # type: ignore[misc]
    assert facts["general.architecture"] == "llama"
    assert len(facts["tokenizer.ggml.tokens"]) == 96
    fused, *_ = mlx_lm.load(str(model), adapter_path=str(run.path))
    layer = fused.layers[0].mlp.down_proj.fuse()
    np.testing.assert_allclose(np.array(tensors["blk.0.ffn_down.weight"]), np.array(layer.weight), atol=1e-3)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["manifest.json", "model-f16.gguf"]
