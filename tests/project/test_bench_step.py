"""scripts/bench_step.py works on a fresh machine and compares like with like. Its measurements are not tested."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_step.py"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The output for one pair with the tiny model and small leaves, run outside the project folder."""
    small = ["--tiny", "--pairs", "1", "--steps", "2", "--batch", "3", "--leaf-tokens", "64"]
    command = [sys.executable, str(SCRIPT), *small]
    done = subprocess.run(
        command, cwd=tmp_path_factory.mktemp("elsewhere"), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)  # stdout has nothing else
    return found


def test_both_train_the_same_targets_of_the_same_rows(result: dict[str, Any]) -> None:
    assert result["rows"] == 6
    assert result["mlxdist"]["targets_per_epoch"] == result["mlx_lm"]["targets_per_epoch"] > 0
    # First adapter and targets are the same; only the order of batches and the trained padding differ.
    losses = [result[side]["loss_in_the_last_epoch"] for side in ("mlxdist", "mlx_lm")]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_the_step_without_a_wire_has_the_same_bits(result: dict[str, Any]) -> None:
    assert result["wire"]["same_bits"] is True
    assert len(result["wire"]["overhead_seconds_by_pair"]) > 1


def test_every_figure_comes_with_the_machine_and_versions_it_was_measured_on(result: dict[str, Any]) -> None:
    for side in ("mlxdist", "mlx_lm"):
        shares = [result[side][f"{which}_share_of_gemm_peak"] for which in ("needed", "computed")]
        assert 0 < shares[0] <= shares[1]
        assert result[side]["supervised_tokens_per_second"] > 0
    assert len(result["ratio_by_pair"]) == 1
    assert result["settings"]["model"] == "tiny"
    assert set(result["versions"]) == {"mlxdist", "mlx", "mlx-lm"}
    assert set(result["machine"]) == {"system", "machine", "cores", "threads", "openblas"}


def test_the_share_of_building_is_a_part_of_the_step(result: dict[str, Any]) -> None:
    found = result["building"]
    assert 0 <= found["share_while_the_device_waits"] <= found["share_of_a_step"] < 1
    assert found["share_of_a_step"] + found["share_in_evaluations"] < 1
    assert found["leaves"] >= 2
