"""Hugging Face's peft and mlx-lm give the same logits with one adapter, dense and with experts.

Needs torch and peft, which scripts/test has in a folder of their own and runs this file with; otherwise it is skipped.
By hand: pip install "mlxdist[peft]".
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlxdist.coordinator.export import export_adapter
from mlxdist.coordinator.storage.adapter_files import load_adapter
from mlxdist.coordinator.storage.peft_files import write_peft

torch: Any = pytest.importorskip("torch")
peft: Any = pytest.importorskip("peft")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

IDS = [[5, 9, 12, 30, 3, 17, 8, 21]]
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
MODELS = {
    "llama": SIZES,
    "qwen3": SIZES,
    "qwen3_moe": {**SIZES, **EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "mixtral": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def transformers_model(kind: str, folder: Path) -> Any:
    """A random model of transformers, saved into `folder` as mlx-lm loads it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **MODELS[kind])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    rope = written.get("rope_parameters") or {}
    (folder / "config.json").write_text(
        json.dumps({"rope_theta": rope.get("rope_theta", 10000.0), **MODELS[kind], **written})
    )
    return model


def random_adapter(folder: Path) -> tuple[Any, dict[str, np.ndarray[Any, Any]]]:
    """The model by mlx-lm with LoRA on every linear layer and all experts, but for the router, with random values.

    The ranks differ between modules, as by_bits makes them.
    """
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    model.freeze()
    kinds = (nn.Linear, SwitchLinear)
    keys = [path for path, module in model.layers[0].named_modules() if isinstance(module, kinds)]
    for rank, some in ((2, keys[::2]), (3, keys[1::2])):
        some = [key for key in some if not key.endswith(".gate")]
        linear_to_lora_layers(model, 2, {"rank": rank, "scale": 1.5, "dropout": 0.0, "keys": some})
    random = np.random.default_rng(5)
    found = {
        name: random.standard_normal(tensor.shape).astype(np.float32) * 0.2
        for name, tensor in sorted(tree_flatten(model.trainable_parameters()))
    }
    return model, found


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_peft_and_mlx_lm_give_the_same_logits(kind: str, tmp_path: Path) -> None:
    theirs = transformers_model(kind, tmp_path / "base")
    model, tensors = random_adapter(tmp_path / "base")
    model.load_weights([(name, mx.array(tensor)) for name, tensor in tensors.items()], strict=False)
    ours = np.array(model(mx.array(IDS)))
    export_adapter(tmp_path / "adapter", tensors, base_model="base", num_layers=-1, scale=1.5)
    unpadded, _ = load_adapter(tmp_path / "adapter")
    write_peft(tmp_path / "peft", unpadded, scale=1.5, base_model="base", model_type=kind)
    with torch.no_grad():
        base = theirs(torch.tensor(IDS)).logits.numpy()
        adapted = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "peft"))
        logits = adapted(torch.tensor(IDS)).logits.numpy()
    np.testing.assert_allclose(logits, ours, rtol=1e-4, atol=1e-4)
    assert np.abs(logits - base).max() > 0.1  # the adapter does something


def test_an_adapter_that_peft_has_saved_is_read_as_it_is(tmp_path: Path) -> None:
    base = transformers_model("llama", tmp_path / "base")
    settings = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], use_rslora=True)
    adapted = peft.get_peft_model(base, settings)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.2)
        logits = adapted(torch.tensor(IDS)).logits.numpy()
    adapted.save_pretrained(tmp_path / "peft")
    tensors, config = load_adapter(tmp_path / "peft")
    scale = config["lora_parameters"]["scale"]  # type: ignore[index]  # a table
    export_adapter(tmp_path / "ours", tensors, base_model="base", num_layers=-1, scale=scale)
    from mlx_lm.tuner.utils import load_adapters
    from mlx_lm.utils import load_model

    model = load_adapters(load_model(tmp_path / "base")[0], str(tmp_path / "ours"))
    np.testing.assert_allclose(np.array(model(mx.array(IDS))), logits, rtol=1e-4, atol=1e-4)
