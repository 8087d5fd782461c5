"""Measures a DPO or KTO step on this machine: time in the first and later epochs, and peak memory.

    pip install "mlx-lm-lora==5.10.2"
    python -m scripts.bench_preference --model models/SmolLM2-135M-Instruct
    python -m scripts.bench_preference --model models/SmolLM2-135M-Instruct --prompt 400 --response 100 --rows 4
    python -m scripts.bench_preference --model models/SmolLM2-135M-Instruct --method kto
    python -m scripts.bench_preference --tiny --method kto        # a tiny random model: only tests the script

DPO is measured against mlx-lm-lora. KTO has no other trainer on MLX, so it is measured against a plain loop
(scripts/bench_preference_sides.py). Both sides train LoRA on the same modules with the same rows. One batch holds all
the data, so every step is an epoch: the first step of mlxdist computes the reference, later ones have it, and the other
side computes it at each step. The two take turns, each in its own process, with the same threads and the same BLAS.
Prints JSON. Memory is the peak of MLX in the process that computes; time is a whole step, for mlxdist including the
wire.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scripts.random_rows import random_rows

THREADS = "1"  # as in a node of mlxdist on Linux; the same for both sides
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, SCALE, BETA, RATE, MAX_LENGTH = 8, 1.0, 0.1, 5e-5, 1024
LOSSES = {"dpo": "sigmoid", "kto": "kto"}

RUN_TOML = """
model = {model}
method = {method}
output = "run"
[data]
path = "data"
[batch]
size = {rows}
leaf_tokens = {leaf_tokens}
max_length = {max_length}
[lora]
rank = {rank}
scale = {scale}
rank_scaling = "constant"
target_modules = {modules}
[train]
steps = {steps}
learning_rate = {rate}
schedule = "constant"
warmup_steps = 0
max_grad_norm = 0.0
eval_every = 0
report_memory = true
[preference]
beta = {beta}
loss = {loss}
"""


def prepare(
    folder: Path, model: str, method: str, rows: list[str], steps: int, leaf_tokens: int | str = "auto"
) -> None:
    """Writes the data and run.toml."""
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text("\n".join(rows) + "\n")
    text = RUN_TOML.format(
        model=json.dumps(model),
        method=json.dumps(method),
        loss=json.dumps(LOSSES[method]),
        rows=len(rows),
        leaf_tokens=json.dumps(leaf_tokens),
        max_length=MAX_LENGTH,
        rank=RANK,
        scale=SCALE,
        modules=json.dumps(MODULES),
        steps=steps,
        rate=RATE,
        beta=BETA,
    )
    (folder / "run.toml").write_text(text)


def measure_ours(folder: Path) -> dict[str, Any]:
    """Measures the seconds of every step and the largest peak in GB, from the events of a run."""
    subprocess.run(
        [sys.executable, "-m", "mlxdist", "launch", "run.toml"],
        cwd=folder,
        check=True,
        stdout=sys.stderr,
        env=_environment(),
    )
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [event for event in map(json.loads, lines) if event["event"] == "train"]
    return {
        "seconds": [step["seconds"] for step in steps],
        "peak_gb": max(step["peak_gb"] for step in steps),
        "losses": [step["loss"] for step in steps],
    }


def measure_theirs(folder: Path) -> dict[str, Any]:
    """Measures the same for the other side, in its own process."""
    command = [sys.executable, "-m", "scripts.bench_preference_sides", str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=_environment())
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _environment() -> dict[str, str]:
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(names, THREADS), "MLX_ENABLE_TF32": "0", "HF_HUB_OFFLINE": "1"}


def summary(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns medians over the rounds. Later steps of a round count by their median, theirs without compilation.

    The ratio of the fastest steps of all rounds is there too: it is steadier on a machine with other work.
    """

    def later(round_: dict[str, Any]) -> float:
        return statistics.median(round_["seconds"][1:])

    def fastest(rounds: list[dict[str, Any]]) -> float:
        return min(second for round_ in rounds for second in round_["seconds"][1:])

    ratios = [later(right) / later(left) for left, right in zip(ours, theirs, strict=True)]
    memory = [left["peak_gb"] / right["peak_gb"] for left, right in zip(ours, theirs, strict=True)]
    return {
        "mlxdist": {
            "first_epoch_seconds": statistics.median(round_["seconds"][0] for round_ in ours),
            "later_epoch_seconds": statistics.median(map(later, ours)),
            "fastest_later_step_seconds": fastest(ours),
            "peak_gb": statistics.median(round_["peak_gb"] for round_ in ours),
        },
        "other": {
            "step_seconds": statistics.median(map(later, theirs)),
            "fastest_step_seconds": fastest(theirs),
            "peak_gb": statistics.median(round_["peak_gb"] for round_ in theirs),
        },
        "times_faster_from_the_second_epoch": statistics.median(ratios),
        "times_faster_by_round": ratios,
        "times_faster_by_the_fastest_steps": fastest(theirs) / fastest(ours),
        "peak_memory_ratio": statistics.median(memory),
        "losses_in_the_last_round": {"mlxdist": ours[-1]["losses"], "other": theirs[-1]["losses"]},
    }


def main() -> None:
    """Measures both in turns, and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="folder or hub id, as for mlx_lm.load")
    parser.add_argument("--method", choices=LOSSES, default="dpo")
    parser.add_argument("--data", type=Path, help="rows as JSON lines; by default those of examples/")
    parser.add_argument("--prompt", type=int, help="tokens of the prompts of random rows, in place of --data")
    parser.add_argument("--response", type=int, default=100, help="tokens of their responses")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--leaf-tokens", default="auto", help="tokens per leaf of mlxdist")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a tiny random model instead")
    given = parser.parse_args()
    if not given.model and not given.tiny:
        parser.error("--model is needed")
    if given.method == "dpo" and find_spec("mlx_lm_lora") is None:
        parser.error('DPO is measured against mlx-lm-lora: pip install "mlx-lm-lora==5.10.2"')
    leaf_tokens = given.leaf_tokens if given.leaf_tokens == "auto" else int(given.leaf_tokens)
    ours, theirs = [], []
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            model = _tiny(folder, given.method) if given.tiny else _absolute(given.model)
            rows = _rows(given, folder)
            prepare(folder, model, given.method, rows, given.steps, leaf_tokens)
            ours.append(measure_ours(folder))
            theirs.append(measure_theirs(folder))
    names = ("mlxdist", "mlx", "mlx-lm", *(["mlx-lm-lora"] if given.method == "dpo" else []))
    machine = {"machine": platform.machine(), "system": platform.system(), "threads": THREADS}
    settings = {"method": given.method, "rows": len(rows), "leaf_tokens": leaf_tokens, "steps": given.steps}
    found = {**summary(ours, theirs), **settings, **machine, "versions": {name: version(name) for name in names}}
    print(json.dumps(found, indent=2))


def _rows(given: argparse.Namespace, folder: Path) -> list[str]:
    if given.prompt:
        return random_rows(given.method, given.rows, given.prompt, given.response)
    tiny, examples = folder / "tiny-data", Path(__file__).resolve().parent.parent / "examples"
    data = given.data or ((tiny if given.tiny else examples / given.method) / "train.jsonl")
    return data.read_text(encoding="utf-8").splitlines()[: given.rows]


def _absolute(model: str) -> str:
    return str(Path(model).resolve()) if Path(model).exists() else model


def _tiny(folder: Path, method: str) -> str:
    from scripts.toy_preferences import write_model, write_rows

    write_model(folder / "tiny")
    write_rows(folder / "tiny-data", method, 16)
    return str(folder / "tiny")


if __name__ == "__main__":
    main()
