"""One run of a published model: SmolLM2-135M-Instruct on the project's own examples."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import mlx_lm
import pytest

from tests.processes.real_model import smollm2

pytestmark = [pytest.mark.slow, pytest.mark.real]

REPOSITORY = Path(__file__).resolve().parents[2]


def test_smollm2_learns_the_same_bits_on_one_node_and_on_two(tmp_path: Path) -> None:
    smollm2()
    shas = set()
    for nodes in (1, 2):
        output = tmp_path / str(nodes)
        command = [sys.executable, "-m", "mlxdist", "launch", "examples/sft/run.toml", "--nodes", str(nodes)]
        result = subprocess.run(
            [*command, "--set", f"output={output}", "--set", "train.steps=4", "--set", "train.eval_every=2"],
            cwd=REPOSITORY,
            env=os.environ,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        shas.add(hashlib.sha256((output / "adapters.safetensors").read_bytes()).hexdigest())
        metrics = json.loads((output / "metrics.json").read_text())
        first, last = (val["loss"] for val in metrics["val_trajectory"])
        assert last < first
    assert len(shas) == 1
    model, tokenizer, *_ = mlx_lm.load(str(smollm2()), adapter_path=str(tmp_path / "1"))
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    assert "Paris" in mlx_lm.generate(model, tokenizer, prompt, max_tokens=24)
