"""scripts/bench_hybrid.py works on a fresh machine and trains the same on both sides. Its figures are not tested."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_both_sides_train_the_same_row_to_the_same_losses() -> None:
    command = [sys.executable, "-m", "scripts.bench_hybrid", "--tiny", "--rounds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)  # stdout has nothing else
    assert [(each["tokens"], each["gates"]) for each in result["operation"]] == [
        (12, "per head"),
        (70, "per head"),
        (12, "per channel"),
        (70, "per channel"),
    ]
    for step in result["step"]:
        losses = step["losses"]
        assert losses["mlxdist"] == pytest.approx(losses["mlx_lm"], rel=1e-4)
        assert len(losses["mlxdist"]) == 2
        assert step["mlx_lm"]["peak_mb"] > 0 < step["times_as_fast"]
