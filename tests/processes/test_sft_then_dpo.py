"""Two runs, one after the other: the second starts where the first ended, with that as its reference."""

import json
from pathlib import Path

import pytest

from mlxdist.coordinator.config.load import load_config
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.run import run
from tests.laws.model_folder import WORDS
from tests.processes.node_pools import Pools

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sft-then-dpo"


def copied(folder: Path, model: Path) -> tuple[RunConfig, RunConfig]:
    """The two files of the example with their folders, but rows of the tiny model's words, and fewer steps."""
    data = folder / "examples" / "dpo"
    data.mkdir(parents=True)
    rows = [
        {
            "prompt": [{"role": "user", "content": WORDS[4 + n]}],
            "chosen": WORDS[9 + n],
            "rejected": f"{WORDS[50 + n]} w4",
        }
        for n in range(16)
    ]
    for name in ("train", "valid"):
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    here = folder / "examples" / "sft-then-dpo"
    here.mkdir()
    for file in EXAMPLE.glob("*.toml"):
        (here / file.name).write_text(file.read_text())
    changes = (f"model={model}", "train.steps=4", "train.eval_every=2", "train.eval_rows=all", "lora.rank=4")
    first = load_config(here / "1-sft.toml", changes)
    (first.output).mkdir(parents=True)
    for name in ("adapter_config.json", "adapters.safetensors"):  # the second file is loaded before the first has run
        (first.output / name).touch()
    second = load_config(here / "2-dpo.toml", changes)
    for name in ("adapter_config.json", "adapters.safetensors"):
        (first.output / name).unlink()
    return first, second


def test_the_second_run_of_the_example_starts_from_the_first(pools: Pools, model: Path, tmp_path: Path) -> None:
    first, second = copied(tmp_path, model)
    assert second.lora.init_adapter == str(first.output)
    assert run(first, pools.hosts(2), resume=False, environ={}) == 0
    assert run(second, pools.hosts(2), resume=False, environ={}) == 0
    events = [json.loads(line) for line in (second.output / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "train"]
    assert steps[0]["loss"] == pytest.approx(0.693147, abs=1e-6)  # rewards are measured from the first run's adapter
    assert steps[0]["rewards/margins"] == 0.0
    assert steps[-1]["loss"] < steps[0]["loss"]
