"""Trains the same adapter with one process and with two, by mlx-lm, mlx-lm-lora and mlxdist; prints the distances.

    python -m venv other && other/bin/pip install "mlx-lm-lora==5.10.2" "mlx-lm==0.32.2" "mlx[cpu]==0.32.4"
    python -m scripts.compare_mlx --python other/bin/python

Each program trains a tiny llama in float32 with its own command, from the same first adapter, 8 steps of 8 rows, once
alone and once with two processes on this machine (mlx.launch with the ring backend; two nodes of mlxdist). A global
batch has the same rows in both. The distance of two adapters is the norm of the difference of all lora_b, which start
at 0, relative to their norm: 0 means that the number of processes did not matter.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from scripts.toy_preferences import LAYERS, MODULES, RANK, SCALE, write_adapter, write_model, write_rows

ROWS, BATCH, STEPS = 64, 8, 8
METHODS = ("sft", "dpo", "orpo")
SECONDS = 300
TEMPLATE = (  # mlx-lm trains pairs and prompts through a chat template only
    "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }}{{ '<eos>' if m['role'] == 'assistant' else '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)
SIDE = """\
import runpy, sys
import mlx.core as mx
mx.set_wired_limit = lambda _: 0  # asks for the working set of a GPU, which a CPU does not have
info = {**mx.device_info(), "max_recommended_working_set_size": 0}
mx.device_info = lambda *_: info
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
RUN_TOML = """
model = "model"
method = "{method}"
output = "ours-{nodes}"
data = "{data}"
[batch]
size = {batch}
leaf_tokens = 128
order = "shuffled"
[lora]
rank = {rank}
scale = {scale}
rank_scaling = "constant"
target_modules = {modules}
init_adapter = "adapter"
[train]
steps = {steps}
learning_rate = 1e-3
warmup_steps = 0
eval_every = 0
"""


def prepare(folder: Path) -> None:
    """Writes the model, the first adapter, pairs, and the same pairs as prompts with completions."""
    write_model(folder / "model")
    write_adapter(folder / "adapter")
    config = folder / "model" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    write_rows(folder / "pairs", "dpo", ROWS)
    rows = [json.loads(line) for line in (folder / "pairs" / "train.jsonl").read_text().splitlines()]
    (folder / "prompts").mkdir()
    lines = (json.dumps({"prompt": row["prompt"], "completion": row["chosen"]}) for row in rows)
    (folder / "prompts" / "train.jsonl").write_text("\n".join(lines) + "\n")
    for name in ("pairs", "prompts"):
        (folder / name / "valid.jsonl").write_text((folder / name / "train.jsonl").read_text())


def data_of(method: str) -> str:
    """Returns the folder of a method's rows."""
    return "prompts" if method == "sft" else "pairs"


def half_of(folder: Path, shares: int) -> None:
    """Writes the pairs that the first of `shares` processes of mlx-lm-lora takes: every other one by length."""
    lines = (folder / "pairs" / "train.jsonl").read_text().splitlines()
    by_length = sorted(lines, key=lambda line: len(json.loads(line)["prompt"] + json.loads(line)["chosen"]))
    (folder / "half").mkdir()
    for name in ("train", "valid"):
        (folder / "half" / f"{name}.jsonl").write_text("\n".join(by_length[::shares]) + "\n")


def train_there(folder: Path, python: str, module: str, method: str, processes: int, name: str, data: str = "") -> Path:
    """Trains with mlx-lm or mlx-lm-lora and returns the adapter's file; `data`: other rows, one process's share."""
    share = 2 if data else 1
    settings = {
        "model": "model",
        "train": True,
        "data": data or data_of(method),
        "seed": 0,
        "num_layers": LAYERS,
        "batch_size": BATCH // share,
        "iters": STEPS,
        "steps_per_report": STEPS,
        "steps_per_eval": 10 * STEPS,
        "val_batches": 1,
        "learning_rate": 1e-3,
        "mask_prompt": True,
        "resume_adapter_file": "adapter/adapters.safetensors",
        "adapter_path": name,
        "lora_parameters": {"rank": RANK, "scale": SCALE, "dropout": 0.0},
        **({"train_mode": method, "fuse": False} if module == "mlx_lm_lora.train" else {}),
    }
    (folder / f"{name}.yaml").write_text(json.dumps(settings))  # JSON is YAML
    (folder / "side.py").write_text(SIDE)
    words = ["side.py", module, "--config", f"{name}.yaml"]
    if processes > 1:
        launch = str(Path(python).parent / "mlx.launch")
        words = [launch, "-n", str(processes), "--backend", "ring", "--cwd", str(folder), "--python", python, *words]
    else:
        words = [python, *words]
    log = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, "MLX_DISABLE_COMPILE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    ).stdout
    file = folder / name / "adapters.safetensors"
    if not file.exists():
        sys.exit(f"{module} {method}: no adapter:\n{log[-2000:]}")
    return file


def train_here(folder: Path, method: str, nodes: int) -> Path:
    """Trains with `mlxdist launch` and returns the adapter's file."""
    name = f"{method}-{nodes}"
    text = RUN_TOML.format(
        method=method,
        nodes=name,
        data=data_of(method),
        batch=BATCH,
        steps=STEPS,
        rank=RANK,
        scale=SCALE,
        modules=json.dumps(MODULES),
    )
    (folder / f"{name}.toml").write_text(text)
    words = [sys.executable, "-m", "mlxdist", "launch", f"{name}.toml", "--nodes", str(nodes)]
    subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=SECONDS)
    return folder / f"ours-{name}" / "adapters.safetensors"


def distance(one: Path, two: Path) -> float:
    """Returns the norm of the difference of all lora_b, relative to the norm of the first ones."""
    first, second = load_file(one), load_file(two)
    names = sorted(name for name in first if name.endswith("lora_b"))
    whole = np.sqrt(sum(float(np.sum(first[name].astype(np.float64) ** 2)) for name in names))
    apart = sum(float(np.sum((first[name].astype(np.float64) - second[name]) ** 2)) for name in names)
    return float(np.sqrt(apart) / whole)


def main(words: Sequence[str] | None = None) -> None:
    """Prints the distances as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", required=True, help="interpreter with mlx-lm-lora and mlx-lm")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    given = parser.parse_args(words)
    python = str(Path(given.python).absolute())
    asked = "from importlib.metadata import version as v; print(v('mlx'), v('mlx-lm'), v('mlx-lm-lora'))"
    theirs = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True).stdout.split()
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        half_of(folder, 2)
        for method in given.methods:
            row = found[method] = {}
            if method == "sft":
                files = [train_there(folder, python, "mlx_lm.lora", method, n, f"mlx-lm-{n}") for n in (1, 2)]
                row["mlx-lm"] = distance(*files)
            places = [f"lora-{method}-{n}" for n in (1, 2)]
            alone, both = (train_there(folder, python, "mlx_lm_lora.train", method, n + 1, places[n]) for n in (0, 1))
            row["mlx-lm-lora"] = distance(alone, both)
            if method != "sft":
                half = train_there(folder, python, "mlx_lm_lora.train", method, 1, f"half-{method}", "half")
                row["mlx-lm-lora, two processes against one with half of the pairs"] = distance(half, both)
            row["mlxdist"] = distance(*(train_here(folder, method, n) for n in (1, 2)))
            print(json.dumps({method: row}), file=sys.stderr, flush=True)
    versions = {"mlxdist": version("mlxdist"), **dict(zip(("mlx", "mlx-lm", "mlx-lm-lora"), theirs, strict=True))}
    print(json.dumps({"versions": versions, "steps": STEPS, "batch": BATCH, "distance": found}, indent=1))


if __name__ == "__main__":
    main()
