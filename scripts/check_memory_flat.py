"""Trains many steps of a tiny model and checks that no process grows: coordinator, supervisors, workers.

    python scripts/check_memory_flat.py                  # 2,000 steps on two nodes, some minutes
    python scripts/check_memory_flat.py --steps 300

The script reads the resident memory of every process during the run. The first tenth does not count, because caches
fill and mlx keeps memory that it has used once. Growth is the mean of the last tenth relative to the mean of the second
tenth. The rows have many lengths, and both nodes compute leaves of each window. Prints JSON; the exit status is 1 if a
process grew by 1 % or more.
"""

import argparse
import json
import random
import string
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 0.01
POLL_SECONDS = 0.2
RUN_TOML = """
model = "model"
output = "run"
data = "train.jsonl"
method = "{method}"
[batch]
size = 4
max_length = 128
[train]
steps = {steps}
eval_every = 0
save_every = 50
[memory]
segment_size = {segment_size}
"""


def main() -> None:
    """Runs the check and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--method", choices=("sft", "dpo", "kto"), default="sft")
    parser.add_argument("--segment-size", type=int, default=1)
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT))  # for scripts.*, from any folder
    from scripts.toy_preferences import write_model

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model(folder / "model")
        (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows(given.method)), encoding="utf-8")
        settings = {"method": given.method, "steps": given.steps, "segment_size": given.segment_size}
        (folder / "run.toml").write_text(RUN_TOML.format(**settings), encoding="utf-8")
        command = [sys.executable, "-m", "mlxdist", "launch", "run.toml", "--nodes", str(given.nodes)]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as run:
            samples = watch(run, folder / "run/metrics.jsonl")
        if run.returncode:
            sys.exit(f"the run ended with {run.returncode}")
    report = {"steps": given.steps, "method": given.method, "segment_size": given.segment_size, **judge(samples)}
    print(json.dumps(report, indent=2))
    sys.exit(0 if report["flat"] else 1)


def rows(method: str) -> list[dict[str, Any]]:
    """Makes sixty rows of 4 to 100 letters, each a token of the tiny model."""
    draw = random.Random(0)

    def letters(count: int) -> str:
        return "".join(draw.choices(string.ascii_letters, k=count))

    made = []
    for number in range(60):
        prompt, answer = letters(draw.randint(2, 50)), letters(draw.randint(2, 50))
        row: dict[str, Any] = {"prompt": prompt, "completion": answer}
        if method == "dpo":
            row = {"prompt": prompt, "chosen": answer, "rejected": letters(draw.randint(2, 50))}
        elif method == "kto":
            row["label"] = number % 2 == 0
        made.append(row)
    return made


def watch(run: "subprocess.Popen[bytes]", metrics: Path) -> dict[str, list[tuple[int, int]]]:
    """Collects (step, resident bytes) by process, until the run ends."""
    samples: dict[str, list[tuple[int, int]]] = defaultdict(list)
    seen, step = 0, 0
    while run.poll() is None:
        time.sleep(POLL_SECONDS)
        if not metrics.exists():
            continue
        with metrics.open("rb") as events:
            events.seek(seen)
            for line in events:
                if not line.endswith(b"\n"):
                    break
                seen += len(line)
                event = json.loads(line)
                step = event["step"] if event["event"] == "train" else step
        if not step:
            continue
        try:
            family = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
            for process in family:
                samples[name_of(process)].append((step, process.memory_info().rss))
        except psutil.NoSuchProcess:
            continue
    return samples


def name_of(process: psutil.Process) -> str:
    """Returns a name such as 'worker 123', 'supervisor 122' or 'coordinator 120'."""
    words = process.cmdline()
    kinds = {"worker": "mlxdist.node.worker", "supervisor": "node", "coordinator": "launch"}
    kind = next((kind for kind, word in kinds.items() if word in words), "other")
    return f"{kind} {process.pid}"


def judge(samples: dict[str, list[tuple[int, int]]]) -> dict[str, Any]:
    """Returns, for each process, the mean megabytes early and late, and the growth."""
    last = max(step for each in samples.values() for step, _ in each)
    found: dict[str, Any] = {}
    for name, each in samples.items():
        early = [size for step, size in each if last * 0.1 <= step < last * 0.2]
        late = [size for step, size in each if step >= last * 0.9]
        if early and late:
            growth = fmean(late) / fmean(early) - 1
            found[name] = {
                "early_mb": round(fmean(early) / 1e6, 2),
                "late_mb": round(fmean(late) / 1e6, 2),
                "growth": round(growth, 5),
            }
    return {"processes": found, "flat": bool(found) and all(each["growth"] < LIMIT for each in found.values())}


if __name__ == "__main__":
    main()
