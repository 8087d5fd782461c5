"""Measures a training step on this machine: against mlx-lm's own trainer, and against the same step without a wire.

    python scripts/demo_model.py models/SmolLM2-135M-Instruct
    python scripts/bench_step.py --model models/SmolLM2-135M-Instruct
    python scripts/bench_step.py --model models/SmolLM2-135M-Instruct --prompt 400 --response 20
    python scripts/bench_step.py --tiny        # a tiny random model: only tests the script

Both trainers get the same rows with masked prompts, the same LoRA layers, one thread and the same BLAS. Each trains
epochs over all rows in its own order and batches, and they take turns: one step of mlxdist, on a real node over the
wire, one step of `mlx_lm.tuner.train`. A pair is one epoch of each; the first epoch, in which mlx-lm compiles, does
not count. Then one step of about a second is computed in turns by the node and in this process alone, and the steps of
one epoch here, to see the part of them in which graphs are built. Prints JSON, which docs/benchmarks.md explains.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from mlxdist.node.work.blas import use_openblas

ROOT = Path(__file__).resolve().parent.parent
THREADS = "1"  # as in a node on Linux
EXAMPLE_TURNS = 4  # the rows of the example are short and of equal length; joined into conversations, lengths are mixed
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
RUN_TOML = """
model = {model}
output = "run"
data = "train.jsonl"
[batch]
size = {batch}
leaf_tokens = {leaf_tokens}
max_length = {max_length}
[memory]
segment_size = {segment_size}
[lora]
rank_scaling = "constant"
"""


def main() -> None:
    """Measures, and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(ROOT / "models/SmolLM2-135M-Instruct"), help="a model folder")
    parser.add_argument("--data", type=Path, help="rows of messages as JSON lines; by default the example's")
    parser.add_argument(
        "--turns", type=int, help="join 1 to so many rows to one conversation; by default 1, the example's 4"
    )
    parser.add_argument("--prompt", type=int, help="tokens of the prompts of random rows, in place of --data")
    parser.add_argument("--response", type=int, default=20, help="tokens of their answers")
    parser.add_argument("--steps", type=int, default=3, help="steps in an epoch over the rows")
    parser.add_argument("--pairs", type=int, default=3, help="epochs of each side that count")
    parser.add_argument("--batch", type=int, default=4, help="rows in a step")
    parser.add_argument("--leaf-tokens", default="auto", help="tokens of a leaf of ours; mlx-lm takes the batch whole")
    parser.add_argument("--segment-size", default="off", help="layers of a segment of ours, or off: the whole graph")
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--tiny", action="store_true", help="a tiny random model instead")
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT))  # for scripts.*, from any folder
    from scripts.machine import this_machine, versions
    from scripts.random_rows import random_rows

    if not given.tiny and not (Path(given.model) / "config.json").is_file():
        parser.error(f"{given.model} is not a model folder; scripts/demo_model.py makes one, --model names another")
    turns = given.turns or (1 if given.data else EXAMPLE_TURNS)
    data = given.data or ROOT / "examples/sft/train.jsonl"
    count = given.steps * given.batch
    if given.prompt:
        lines = random_rows("sft", count, given.prompt, given.response)
    else:
        lines = rows_from(data / "train.jsonl" if data.is_dir() else data, count, turns)

    # OpenBLAS reads this when it is loaded, which must be before mlx is imported.
    os.environ.update(OPENBLAS_NUM_THREADS=THREADS, OMP_NUM_THREADS=THREADS, MLX_ENABLE_TF32="0", HF_HUB_OFFLINE="1")
    openblas = use_openblas()
    from scripts.bench_step_measure import measure

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = tiny_model(folder / "tiny") if given.tiny else Path(given.model).resolve()
        settings = {"batch": given.batch, "max_length": given.max_length}
        for name, value in (("leaf_tokens", given.leaf_tokens), ("segment_size", given.segment_size)):
            settings[name] = int(value) if value.isdigit() else value
        written = {name: json.dumps(value) for name, value in settings.items()}
        (folder / "run.toml").write_text(RUN_TOML.format(model=json.dumps(str(model)), **written))
        (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        result = measure(folder, lines, given.steps, given.pairs)
    result["settings"] = {"model": model.name, "turns": turns, "steps": given.steps, "pairs": given.pairs, **settings}
    result["machine"] = this_machine(THREADS, openblas)
    result["versions"] = versions()
    print(json.dumps(result, indent=2))


def rows_from(path: Path, count: int, turns: int) -> list[str]:
    """Reads the first rows of a file, each a conversation of 1 to `turns` lines. Raises SystemExit for too few."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    draw = random.Random(0)
    sizes = [draw.randint(1, turns) for _ in range(count)]
    if sum(sizes) > len(lines):
        raise SystemExit(f"{path} has {len(lines)} rows, this takes {sum(sizes)}: lower --steps, --batch or --turns")
    rest = iter(lines)
    return [joined(list(islice(rest, size))) for size in sizes]


def joined(lines: Sequence[str]) -> str:
    """Joins the messages of lines into one row; a single line stays as it is."""
    if len(lines) == 1:
        return lines[0]
    return json.dumps({"messages": [message for line in lines for message in json.loads(line)["messages"]]})


def tiny_model(folder: Path) -> Path:
    """Writes a random llama with one token for each character, and a chat template."""
    from scripts.toy_preferences import write_model

    write_model(folder)
    about = folder / "tokenizer_config.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "chat_template": CHAT_TEMPLATE}))
    return folder


if __name__ == "__main__":
    main()
