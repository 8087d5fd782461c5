"""README's row of texts, trained as README says and asked as README says, is answered as it was trained."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes.real_model import smollm2
from tests.project.test_readme import block

pytestmark = [pytest.mark.slow, pytest.mark.real]


def run(*command: str, folder: Path) -> str:
    result = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_mlx_lm_generate_gives_the_answer_that_was_trained(tmp_path: Path) -> None:
    model = str(smollm2())
    row = block('{"prompt"').splitlines()[0]
    (tmp_path / "mine.jsonl").write_text(f"{row}\n" * 6, encoding="utf-8")
    (tmp_path / "run.toml").write_text(block("model ="), encoding="utf-8")
    quick = [f"model={model}", "train.learning_rate=2e-3", "batch.size=2", "train.epochs=4"]
    said = run("mlxdist", "launch", "run.toml", *(part for key in quick for part in ("--set", key)), folder=tmp_path)
    assert "become user and assistant turns of the chat template" in " ".join(said.split())
    question = ["--prompt", "What is the tallest building of Lyon?", "--max-tokens", "24", "--temp", "0"]
    asked = run("mlx_lm", "generate", "--model", model, "--adapter-path", "runs/mine", *question, folder=tmp_path)
    assert "The Tour Incity, 202 meters.\n" in asked
