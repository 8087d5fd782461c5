"""Trains the same adapter with mlxdist and with TRL, and prints the difference of the losses step by step.

    python -m venv trl && trl/bin/pip install "trl==0.23.1" "transformers<5" peft torch
    python -m scripts.compare_trl --trl-python trl/bin/python

Both train the same tiny llama in float32, with LoRA on the same modules from the same adapter, the same rows in the
same order, AdamW with bias correction, cosine to 0, for 100 steps of DPO, of KTO and of ORPO. The losses must agree to
1e-3 relative at every step; TRL with a mask that is off by one must not. TRL needs transformers 4 and mlx-lm needs
transformers 5, so there are two interpreters.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from mlxdist.coordinator.batch.batch_order import steps as order_steps
from mlxdist.coordinator.config.schema import BatchConfig
from scripts.toy_preferences import MODULES, RANK, SCALE, write_adapter, write_model, write_rows

TOLERANCE = 1e-3
ROWS, BATCH = 80, 4
SETTINGS = {"learning_rate": 1e-3, "schedule": "cosine", "weight_decay": 0.01, "max_grad_norm": 1.0, "beta": 0.1}
LOSS = {"dpo": "sigmoid", "kto": "kto", "orpo": "orpo"}
Steps = list[dict[str, float]]

RUN_TOML = """
model = "model"
method = "{method}"
output = "run"
[data]
path = "data"
[batch]
size = {batch}
leaf_tokens = 1
max_length = 512
[lora]
rank = {rank}
scale = {scale}
rank_scaling = "constant"
target_modules = {modules}
init_adapter = "adapter"
[train]
steps = {steps}
learning_rate = {learning_rate}
schedule = "{schedule}"
warmup_steps = 0
min_lr_ratio = 0.0
weight_decay = {weight_decay}
max_grad_norm = {max_grad_norm}
eval_every = 0
[preference]
loss = "{loss}"
beta = {beta}
"""


def prepare(folder: Path, method: str, steps: int) -> None:
    """Writes model, data, first adapter and run.toml."""
    write_model(folder / "model")
    write_adapter(folder / "adapter")
    write_rows(folder / "data", method, ROWS)
    values = {**SETTINGS, "method": method, "batch": BATCH, "steps": steps, "loss": LOSS[method]}
    modules = json.dumps(MODULES)
    (folder / "run.toml").write_text(RUN_TOML.format(**values, rank=RANK, scale=SCALE, modules=modules))


def train_here(folder: Path, nodes: int) -> Steps:
    """Runs `mlxdist launch` and returns the metrics of every step."""
    command = [sys.executable, "-m", "mlxdist", "launch", "run.toml", "--nodes", str(nodes)]
    subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr)
    events = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "train"]


def train_there(folder: Path, method: str, steps: int, trl_python: str, *, plant_mask: bool) -> dict[str, Any]:
    """Runs TRL over the rows in the order of mlxdist; returns its versions and the metrics of every step."""
    rows = [json.loads(line) for line in (folder / "data" / "train.jsonl").read_text().splitlines()]
    batch = BatchConfig(size=BATCH, order="shuffled")
    picks = [row for step in islice(order_steps([0] * ROWS, batch, method), steps) for row in step.windows[0]]
    job, answer = folder / "job.json", folder / "answer.json"
    job.write_text(
        json.dumps(
            {
                "method": method,
                "model": str(folder / "model"),
                "adapter": str(folder / "adapter"),
                "rows": [rows[pick] for pick in picks],
                "settings": {**SETTINGS, "batch_size": BATCH, "steps": steps, "loss": LOSS[method]},
                "plant_mask": plant_mask,
                "scratch": str(folder / "scratch"),
                "answer": str(answer),
            }
        )
    )
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    side = Path(__file__).with_name("compare_trl_side.py")
    subprocess.run([trl_python, str(side), str(job)], check=True, stdout=sys.stderr, env=environment)
    return json.loads(answer.read_text())


def apart(ours: Steps, theirs: Steps) -> list[float]:
    """Returns the relative difference of the losses at every step."""
    if len(ours) != len(theirs):
        raise SystemExit(f"mlxdist took {len(ours)} steps and TRL {len(theirs)}")
    return [abs(left["loss"] - right["loss"]) / abs(right["loss"]) for left, right in zip(ours, theirs, strict=True)]


def largest_gaps(ours: Steps, theirs: Steps) -> dict[str, float]:
    """Returns, for each other common metric, the largest difference over all steps, relative to its size or to 1."""
    gaps: dict[str, float] = {}
    for left, right in zip(ours, theirs, strict=True):
        for name in sorted(left.keys() & right.keys() - {"loss", "learning_rate", "step"}):
            off = abs(left[name] - right[name]) / max(abs(right[name]), 1.0)
            gaps[name] = max(gaps.get(name, 0.0), off)
    return gaps


def main() -> None:
    """Prints the table; the exit status is 1 when a loss differs or the planted bug is not detected."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trl-python", required=True, help="interpreter with trl, torch, peft and transformers 4")
    parser.add_argument("--methods", nargs="+", choices=sorted(LOSS), default=sorted(LOSS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write every step's numbers there")
    arguments = parser.parse_args()
    ours_versions = {name: version(name) for name in ("mlxdist", "mlx", "mlx-lm")}
    record: dict[str, Any] = {**ours_versions}
    agreed = True
    for method in arguments.methods:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            prepare(folder, method, arguments.steps)
            ours = train_here(folder, arguments.nodes)
            right = train_there(folder, method, arguments.steps, arguments.trl_python, plant_mask=False)
            wrong = train_there(folder, method, arguments.steps, arguments.trl_python, plant_mask=True)
        off, planted = apart(ours, right["steps"]), apart(ours, wrong["steps"])
        print(f"\n{method} ({LOSS[method]}), {arguments.nodes} nodes, TRL {right['versions']['trl']}")
        print("  step      mlxdist          TRL   apart   TRL, mask off by one   apart")
        for step in sorted({1, 2, 5, *range(10, arguments.steps + 1, 10), arguments.steps}):
            here, there, bug = (
                ours[step - 1]["loss"],
                right["steps"][step - 1]["loss"],
                wrong["steps"][step - 1]["loss"],
            )
            print(f"  {step:4} {here:12.7f} {there:12.7f} {off[step - 1]:7.0e} {bug:22.7f} {planted[step - 1]:7.0e}")
        print(f"  largest over all steps: {max(off):.1e}; with the planted bug {max(planted):.1e}")
        gaps = largest_gaps(ours, right["steps"])
        print("  other metrics: " + ", ".join(f"{name} {gap:.0e}" for name, gap in gaps.items()))
        agreed = agreed and max(off) <= TOLERANCE < max(planted)
        record |= {method: {"ours": ours, "trl": right["steps"], "planted": wrong["steps"]}, "trl": right["versions"]}
    print("\n" + ", ".join(f"{name} {number}" for name, number in {**right["versions"], **ours_versions}.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(record))
    sys.exit(0 if agreed else 1)


if __name__ == "__main__":
    main()
