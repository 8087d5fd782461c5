"""Measures a DPO step against mlx-lm-lora's on this machine: time in the first and later epochs, and peak memory.

    pip install "mlx-lm-lora==5.10.2"
    python -m scripts.bench_preference --model models/SmolLM2-135M-Instruct

Both train LoRA on the same modules with the same pairs. One batch holds all the data, so every step is an epoch: the
first step of mlxdist computes the reference, later ones have it. mlx-lm-lora keeps a second full model as the reference
and runs it at each step. The two take turns, each in its own process, with the same threads and the same BLAS. Prints
JSON. Memory is the peak of MLX in the process that computes; time is a whole step, for mlxdist including the wire.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

THREADS = "1"  # as in a node of mlxdist on Linux; the same for both sides
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, SCALE, BETA, RATE, MAX_LENGTH = 8, 1.0, 0.1, 5e-5, 1024

RUN_TOML = """
model = {model}
method = "dpo"
output = "run"
[data]
path = "data"
[batch]
size = {pairs}
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
warmup_steps = 0
eval_every = 0
report_memory = true
[preference]
beta = {beta}
"""


def prepare(folder: Path, model: str, rows: list[str], steps: int, leaf_tokens: int | str = "auto") -> None:
    """Writes the data and run.toml."""
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text("\n".join(rows) + "\n")
    text = RUN_TOML.format(
        model=json.dumps(model),
        pairs=len(rows),
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
    """Measures the same for mlx-lm-lora, in its own process."""
    command = [sys.executable, "-m", "scripts.bench_preference", "--theirs", str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=_environment())
    return json.loads(done.stdout.splitlines()[-1])


def train_theirs(folder: Path) -> dict[str, Any]:
    """Runs mlx-lm-lora's `train_dpo` over the pairs of the run in `folder`, with the tokens that mlxdist uses."""
    from mlxdist.node.work.blas import use_openblas

    use_openblas()
    import mlx.core as mx
    from mlx.optimizers import AdamW
    from mlx_lm import load
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm_lora.trainer.dpo_trainer import DPOTrainingArgs, train_dpo

    from mlxdist.coordinator.config.load import load_config
    from mlxdist.coordinator.data.load import read

    if platform.system() != "Darwin":
        mx.set_wired_limit = lambda _: 0  # asks for the working set of a GPU, which a CPU does not have
        info = {**mx.device_info(), "max_recommended_working_set_size": 0}
        mx.device_info = lambda *_: info
    config = load_config(folder / "run.toml")
    rows = read(config, progress=lambda what, share: None).train
    pairs = [_as_theirs(*rows.rows(index)) for index in range(len(rows))]
    steps = config.train.steps or 0
    model, reference = load(config.model)[0], load(config.model)[0]
    reference.freeze()
    model.freeze()
    keys = {name for name, _ in model.layers[0].named_modules() if name.split(".")[-1] in MODULES}
    linear_to_lora_layers(model, len(model.layers), {"rank": RANK, "scale": SCALE, "dropout": 0.0, "keys": keys})
    seen: dict[str, list[float]] = {"seconds": [], "losses": []}

    class Recorder:
        def on_train_loss_report(self, info: Mapping[str, float]) -> None:
            seen["seconds"].append(1 / info["iterations_per_second"])
            seen["losses"].append(info["train_loss"])

        def on_val_loss_report(self, info: Mapping[str, float]) -> None:
            """Does nothing: there is no validation."""

    arguments = DPOTrainingArgs(
        batch_size=len(pairs),
        iters=steps,
        steps_per_report=1,
        steps_per_save=steps + 1,
        adapter_file=str(folder / "theirs.safetensors"),
        max_seq_length=MAX_LENGTH,
        beta=BETA,
    )
    train_dpo(
        model=model,
        ref_model=reference,
        optimizer=AdamW(RATE, bias_correction=True),
        train_dataset=pairs,
        args=arguments,
        training_callback=Recorder(),
    )
    return {**seen, "peak_gb": mx.get_peak_memory() / 1e9}


def _as_theirs(chosen: Any, rejected: Any) -> dict[str, Any]:
    """Returns a pair of rows (ids [T], targets [T]) under the keys that mlx-lm-lora reads."""
    pair: dict[str, Any] = {}
    for name, row in (("chosen", chosen), ("rejected", rejected)):
        pair[name] = row.ids.tolist()
        pair[f"{name}_prompt_length"] = int(row.targets.argmax())
    return pair


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
        "mlx_lm_lora": {
            "step_seconds": statistics.median(map(later, theirs)),
            "fastest_step_seconds": fastest(theirs),
            "peak_gb": statistics.median(round_["peak_gb"] for round_ in theirs),
        },
        "times_faster_from_the_second_epoch": statistics.median(ratios),
        "times_faster_by_round": ratios,
        "times_faster_by_the_fastest_steps": fastest(theirs) / fastest(ours),
        "peak_memory_ratio": statistics.median(memory),
    }


def main() -> None:
    """Measures both in turns, and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="folder or hub id, as for mlx_lm.load")
    parser.add_argument("--data", type=Path, default=Path("examples/dpo/train.jsonl"), help="pairs as JSON lines")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--leaf-tokens", default="auto", help="tokens per leaf of mlxdist")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--theirs", type=Path, help=argparse.SUPPRESS)  # one round of mlx-lm-lora, for this script
    arguments = parser.parse_args()
    if arguments.theirs:
        print(json.dumps(train_theirs(arguments.theirs)))
        return
    if not arguments.model:
        parser.error("--model is needed")
    model = str(Path(arguments.model).resolve()) if Path(arguments.model).exists() else arguments.model
    leaf_tokens = arguments.leaf_tokens if arguments.leaf_tokens == "auto" else int(arguments.leaf_tokens)
    rows = arguments.data.read_text().splitlines()[: arguments.pairs]
    ours, theirs = [], []
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as scratch:
            prepare(Path(scratch), model, rows, arguments.steps, leaf_tokens)
            ours.append(measure_ours(Path(scratch)))
            theirs.append(measure_theirs(Path(scratch)))
    packages = {name: version(name) for name in ("mlxdist", "mlx", "mlx-lm", "mlx-lm-lora")}
    machine = {"machine": platform.machine(), "system": platform.system(), "threads": THREADS}
    settings = {"model": arguments.model, "pairs": len(rows), "leaf_tokens": leaf_tokens, "steps": arguments.steps}
    print(json.dumps({**summary(ours, theirs), **settings, **machine, "versions": packages}, indent=2))


if __name__ == "__main__":
    main()
