"""The comparison scripts write files that both sides can read, and their arithmetic is right."""

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from scripts import bench_preference, compare_mlx, compare_trl, toy_preferences

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_mlx_lm_reads_the_toy_model_with_its_adapter_and_one_token_per_character(tmp_path: Path, method: str) -> None:
    from mlx_lm import load

    compare_trl.prepare(tmp_path, method, steps=3)
    model, tokenizer = load(str(tmp_path / "model"), adapter_path=str(tmp_path / "adapter"))
    assert model(mx.array([[3, 4, 5]])).dtype == mx.float32
    rows = [json.loads(line) for line in (tmp_path / "data" / "train.jsonl").read_text().splitlines()]
    assert len(rows) == compare_trl.ROWS
    assert compare_trl.ROWS % compare_trl.BATCH == 0
    for row in rows:
        for text in (value for value in row.values() if isinstance(value, str)):
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert len(ids) == len(text)
            assert tokenizer.decode(ids) == text


def test_the_same_seed_makes_the_same_toy(tmp_path: Path) -> None:
    for name in ("one", "two"):
        toy_preferences.write_model(tmp_path / name)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


def test_losses_are_compared_relatively_and_step_by_step() -> None:
    ours, theirs = [{"loss": 0.5}, {"loss": 0.11}], [{"loss": 0.5}, {"loss": 0.1}]
    assert compare_trl.apart(ours, theirs) == pytest.approx([0.0, 0.1])
    with pytest.raises(SystemExit, match="2 steps and TRL 1"):
        compare_trl.apart(ours, theirs[:1])


def test_the_benchmark_leaves_the_first_step_out_of_later_epochs() -> None:
    ours = [{"seconds": [9.0, 2.0, 2.0, 2.2], "peak_gb": 1.0, "losses": []}]
    theirs = [{"seconds": [50.0, 4.0, 4.0, 4.4], "peak_gb": 4.0, "losses": []}]
    measured = bench_preference.summary(ours, theirs)
    assert measured["mlxdist"]["first_epoch_seconds"] == 9.0
    assert measured["times_faster_from_the_second_epoch"] == 2.0
    assert measured["peak_memory_ratio"] == 0.25


@pytest.mark.slow
def test_the_benchmark_trains_kto_to_the_losses_of_a_plain_loop() -> None:
    command = [sys.executable, "-m", "scripts.bench_preference", "--tiny", "--method", "kto", "--rounds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    losses = json.loads(done.stdout)["losses_in_the_last_round"]  # stdout has nothing else
    assert losses["mlxdist"] == pytest.approx(losses["other"], rel=1e-5)
    assert losses["mlxdist"][0] == 0.5 > losses["mlxdist"][-1], "it learns"


def test_half_of_the_pairs_is_every_second_one_by_length_as_mlx_lm_lora_cuts_a_batch(tmp_path: Path) -> None:
    compare_mlx.prepare(tmp_path)
    compare_mlx.half_of(tmp_path, 2)
    whole, half = (
        [json.loads(line) for line in (tmp_path / name / "train.jsonl").read_text().splitlines()]
        for name in ("pairs", "half")
    )
    lengths = sorted(len(row["prompt"] + row["chosen"]) for row in whole)
    assert [len(row["prompt"] + row["chosen"]) for row in half] == lengths[::2]
    assert all(row in whole for row in half)


def test_the_distance_of_adapters_is_relative_to_what_training_has_changed(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one", "two")]
    for file, value in zip(files, (2.0, 3.0), strict=True):
        tensors = {"x.lora_b": np.full((2, 3), value, np.float32), "x.lora_a": np.ones((3, 2), np.float32)}
        save_file(tensors, file)
    assert compare_mlx.distance(files[0], files[0]) == 0.0
    assert compare_mlx.distance(*files) == pytest.approx(0.5)
