"""Trains for some minutes while nodes are killed, stopped, slowed and added, and checks that no bit changes.

    python scripts/soak.py --minutes 30 --seed 1
    python scripts/soak.py --minutes 3 --method dpo --folder soak     # keeps the runs and the logs

Four local nodes train a tiny random model under a seeded plan of faults, with time constants a fifth of the defaults.
Then two new nodes train the same number of steps undisturbed. Prints a line now and then, and JSON at the end. The exit
status is 1 where the two adapters differ or a run failed. Every process that was started ends with the script.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for scripts.*, from any folder

from scripts.local_cluster import Events, LocalCluster, adapter_sha, interruptible, local_cluster, machine  # noqa: E402
from scripts.soak_plan import KINDS, NODES, TIMING, Hurting, plan  # noqa: E402

LEAVES = 32
UNDISTURBED_NODES = 2  # a different number on purpose: it must not change a bit either
STUCK_SECONDS = 120.0  # without a step, after which the run counts as failed
SAY_SECONDS = 30.0


def main() -> None:
    """Runs both, compares, and prints the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="of the disturbed run; the other one comes after it"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the plan of faults")
    parser.add_argument("--mean-seconds", type=float, default=4.0, help="between two faults")
    parser.add_argument("--method", choices=("sft", "dpo", "kto"), default="kto")
    parser.add_argument("--folder", type=Path, help="where the runs and the logs stay, for a look afterwards")
    given = parser.parse_args()
    with interruptible(), folder_for(given.folder) as folder:
        report = soak(folder, given)
    print(json.dumps(report, indent=2))
    sys.exit(0 if report["same_bits"] else 1)


def soak(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Trains both runs and returns the report."""
    began = time.monotonic()
    with local_cluster(folder, method=given.method, leaves=LEAVES, timing=TIMING) as cluster:
        start_nodes(cluster, NODES)
        faults = disturbed(cluster, given)
    steps = Events(folder / "disturbed" / "metrics.jsonl")
    steps.news()
    say(f"{steps.steps} steps under faults; now as many undisturbed", began)
    with local_cluster(folder, method=given.method, leaves=LEAVES, timing=TIMING) as cluster:
        start_nodes(cluster, UNDISTURBED_NODES)
        undisturbed(cluster, steps.steps, began)
    shas = {name: adapter_sha(folder / name) for name in ("disturbed", "undisturbed")}
    summaries = {name: json.loads((folder / name / "metrics.json").read_text()) for name in shas}
    return {
        "minutes": given.minutes,
        "seed": given.seed,
        "method": given.method,
        "nodes": NODES,
        "leaves_in_a_step": LEAVES,
        "timing": TIMING,
        "steps": steps.steps,
        "faults": {kind: faults[kind] for kind in KINDS},
        "faults_in_all": sum(faults.values()),
        "disturbed": {"wall_seconds": summaries["disturbed"]["wall_seconds"], **summaries["disturbed"]["losses"]},
        "undisturbed": {"wall_seconds": summaries["undisturbed"]["wall_seconds"], **summaries["undisturbed"]["losses"]},
        "adapter_sha256": shas,
        "same_bits": len(set(shas.values())) == 1,
        **machine(),
    }


def start_nodes(cluster: LocalCluster, nodes: int) -> None:
    """Starts the first nodes of a run."""
    for number in range(nodes):
        cluster.start_node(f"node-{number + 1}")


def disturbed(cluster: LocalCluster, given: argparse.Namespace) -> Counter[str]:
    """Trains the run under faults, which begin after its first step. Returns the number of faults by kind."""
    run = cluster.launch("disturbed", {"train.max_hours": given.minutes / 60})
    events = Events(cluster.folder / "disturbed" / "metrics.jsonl")
    events.wait_for_step(1, run, STUCK_SECONDS)
    hurting, faults = Hurting(cluster), plan(given.seed, given.mean_seconds)
    fault = next(faults)
    began = due = last_said = last_step = time.monotonic()
    due += fault.after
    while run.poll() is None:
        now = time.monotonic()
        if any(event["event"] == "train" for event in events.news()):
            last_step = now
        if now - last_step > STUCK_SECONDS:
            raise SystemExit(
                f"no step for {STUCK_SECONDS:.0f} s: look at {cluster.folder}, the run is at {events.steps}"
            )
        if now >= due and now - began < 60 * given.minutes:
            hurting.hurt(fault)
            fault = next(faults)
            due += fault.after
        if now - last_said >= SAY_SECONDS:
            last_said = now
            say(f"step {events.steps}, {hurting.done.total()} faults, {len(cluster.alive())} nodes", began)
        time.sleep(hurting.act())
    if run.returncode:
        log = (cluster.folder / "disturbed.txt").read_text(errors="replace")
        raise SystemExit(f"the run ended with {run.returncode} after step {events.steps}:\n{log[-2000:]}")
    return hurting.done


def undisturbed(cluster: LocalCluster, steps: int, began: float) -> None:
    """Trains the run to compare with."""
    run = cluster.launch("undisturbed", {"train.steps": steps})
    events = Events(cluster.folder / "undisturbed" / "metrics.jsonl")
    last_said = time.monotonic()
    while run.poll() is None:
        time.sleep(0.2)
        if time.monotonic() - last_said >= SAY_SECONDS:
            last_said = time.monotonic()
            events.news()
            say(f"step {events.steps} of {steps}, undisturbed", began)
    if run.returncode:
        raise SystemExit(f"the undisturbed run ended with {run.returncode}: look at {cluster.folder}")


def say(sentence: str, began: float) -> None:
    """Prints a line of progress on stderr."""
    seconds = int(time.monotonic() - began)
    print(f"{seconds // 60:02d}:{seconds % 60:02d}  {sentence}", file=sys.stderr, flush=True)


@contextmanager
def folder_for(given: Path | None) -> Iterator[Path]:
    """The given folder, or a temporary one."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


if __name__ == "__main__":
    main()
