"""Measures the cost of a lost node: seconds lost and detection times, and the effect of the same faults on mlx.launch.

    python scripts/bench_faults.py                  # about ten minutes
    python scripts/bench_faults.py --times 1 --no-peer

Three local nodes train a tiny random model with KTO and the default timing. Each fault is caused a few times, on
another node each time, after some undisturbed steps. Seconds lost are the seconds of disturbed steps beyond the pace
of the steps around them (decision 0610 in docs/decisions/). Detection is the time from the signal to the event that
reports it. Then three ranks of `mlx_lm lora` under `mlx.launch` (ring backend, this machine) get the same faults and
are watched for `--watch` seconds. Prints JSON, which docs/faults.md explains. Every process that was started ends with
the script.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for scripts.*, from any folder

from mlxdist.coordinator.report.goodput import StepTime, lost_seconds  # noqa: E402
from scripts.bench_faults_peer import peer_faults  # noqa: E402
from scripts.local_cluster import Events, LocalCluster, interruptible, local_cluster, machine, send  # noqa: E402

NODES, LEAVES = 3, 32
CALM_STEPS = 5  # before a fault, and after the node is back
STOPPED_SECONDS = 20.0  # until SIGCONT: longer than a node may be silent
PATIENCE = 180.0  # seconds, of the longest wait
TROUBLE = ("suspect", "dead", "left", "connecting")

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
FAULTS: Mapping[str, tuple[signal.Signals, tuple[str, ...]]] = {
    "SIGKILL of a worker": (KILL, ("worker",)),
    "SIGKILL of a supervisor": (KILL, ("supervisor",)),
    "SIGKILL of both": (KILL, ("supervisor", "worker")),
    "SIGSTOP of a worker": (STOP, ("worker",)),
    "SIGSTOP of a supervisor": (STOP, ("supervisor",)),
    "SIGSTOP of both": (STOP, ("supervisor", "worker")),
}


def main() -> None:
    """Measures, and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=3, help="how often each fault is caused")
    parser.add_argument("--watch", type=float, default=60.0, help="seconds for which mlx.launch is watched")
    parser.add_argument("--no-peer", action="store_true", help="without mlx.launch")
    given = parser.parse_args()
    with interruptible(), tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        report = {"nodes": NODES, "leaves_in_a_step": LEAVES, "times": given.times, "ours": ours(folder, given.times)}
        if not given.no_peer:
            report["mlx.launch"] = peer_faults(folder / "peer", folder / "model", given.watch)
    print(json.dumps({**report, **machine()}, indent=2))


def ours(folder: Path, times: int) -> dict[str, Any]:
    """Causes every fault in one run, one after another, and kills the coordinator last."""
    with local_cluster(folder, method="kto", leaves=LEAVES, timing={}) as cluster:
        for number in range(NODES):
            cluster.start_node(f"node-{number + 1}")
        run = cluster.launch("run", {"train.max_hours": 10, "train.save_every": 1})
        watch = Watch(Events(cluster.folder / "run" / "metrics.jsonl"), lambda: run.poll() is not None)
        watch.until(lambda: watch.ready(NODES), "all nodes to be ready")
        done: list[tuple[str, float, int]] = []  # fault, seconds to its detection, current step
        for _ in range(times):
            for index, fault in enumerate(FAULTS):
                watch.calm_steps()
                print(f"{fault}, after step {watch.events.steps}", file=sys.stderr, flush=True)
                done.append((fault, *hurt(cluster, watch, fault, f"node-{(index + len(done)) % NODES + 1}")))
        watch.calm_steps()
        return {**by_fault(watch.events, done), "SIGKILL of the coordinator": coordinator_killed(cluster, watch)}


class Watch:
    """The events of a run, with the time at which they were written on the clock of this process."""

    def __init__(self, events: Events, over: Callable[[], bool]) -> None:
        self.events, self._over = events, over
        self.began = float("inf")  # of the run: the earliest start that follows from any event, read at once
        self.states: dict[str, str] = {}

    def look(self) -> list[dict[str, Any]]:
        """Returns the new events."""
        news = self.events.news()
        for event in news:
            self.began = min(self.began, time.monotonic() - event["wall_seconds"])
            if event["event"] == "node":
                self.states[event["name"]] = event["state"]
        return news

    def until(self, found: Callable[[], bool], what: str) -> None:
        """Waits until `found` is true. Raises SystemExit when the run ends or it takes too long."""
        deadline = time.monotonic() + PATIENCE
        while True:
            self.look()
            if found():
                return
            if self._over() or time.monotonic() > deadline:
                raise SystemExit(f"waited in vain for {what}; the run is at step {self.events.steps}")
            time.sleep(0.01)

    def ready(self, nodes: int) -> bool:
        """True when so many nodes work."""
        return sum(state in ("ready", "busy") for state in self.states.values()) >= nodes

    def calm_steps(self) -> None:
        """Waits for some undisturbed steps with all nodes."""

        def calm() -> bool:
            last = [event for event in self.events.told if event["event"] == "train"][-CALM_STEPS:]
            return self.ready(NODES) and len(last) == CALM_STEPS and not any(event["disturbed"] for event in last)

        first = self.events.steps
        self.until(lambda: self.events.steps >= first + CALM_STEPS and calm(), "calm steps")


def hurt(cluster: LocalCluster, watch: Watch, fault: str, name: str) -> tuple[float, int]:
    """Causes a fault during a step and ends it. Returns the seconds until it was reported, and the current step."""
    number, parts = FAULTS[fault]
    chosen = [cluster.supervisor(name) if part == "supervisor" else cluster.worker(name) for part in parts]
    step, told = watch.events.steps + 1, len(watch.events.told)
    at = time.monotonic()
    for process in chosen:
        send(process, number)

    def detection() -> dict[str, Any] | None:
        return next((event for event in watch.events.told[told:] if says(event, name)), None)

    watch.until(lambda: detection() is not None, f"{name}'s loss to be reported")
    if number == STOP:
        watch.until(lambda: time.monotonic() - at >= STOPPED_SECONDS, "the time to pass")
        for process in chosen:
            send(process, signal.SIGCONT)
    elif "supervisor" in parts:
        cluster.nodes[name].wait()
        cluster.start_node(name)
    event = detection()
    assert event is not None
    return watch.began + event["wall_seconds"] - at, step


def says(event: Mapping[str, Any], name: str) -> bool:
    """True when an event reports the node's loss, silence or slowness."""
    return event["event"] == "node" and event["name"] == name and (event["state"] in TROUBLE or bool(event["action"]))


def by_fault(events: Events, done: list[tuple[str, float, int]]) -> dict[str, Any]:
    """Returns medians and all values for each fault, and the time of the undisturbed step."""
    train = [event for event in events.told if event["event"] == "train"]
    steps = [
        StepTime(
            event["seconds"],
            event["all_tokens_per_second"] * event["seconds"],
            event["disturbed"],
            event["leaves_recomputed"],
            event["seconds_paused"],
        )
        for event in train
    ]
    lost = list(lost_seconds(steps))
    ends = [step for _, _, step in done[1:]] + [len(steps) + 1]
    found: dict[str, dict[str, list[float]]] = {}
    for (fault, detected, step), end in zip(done, ends, strict=True):
        numbers = found.setdefault(fault, {"seconds_lost": [], "seconds_to_detection": [], "leaves_recomputed": []})
        numbers["seconds_lost"].append(sum(lost[step - 1 : end - 1]))
        numbers["seconds_to_detection"].append(detected)
        numbers["leaves_recomputed"].append(sum(one.leaves_recomputed for one in steps[step - 1 : end - 1]))
    calm = [one.seconds for one in steps[1:] if not one.disturbed]
    return {
        "undisturbed_step_seconds": {"median": round(median(calm), 3), "steps": len(calm)},
        **{
            fault: {
                key: {"median": round(median(each), 2), "all": [round(one, 2) for one in each]}
                for key, each in n.items()
            }
            for fault, n in found.items()
        },
    }


def coordinator_killed(cluster: LocalCluster, watch: Watch) -> dict[str, Any]:
    """Kills the coordinator during a step, then resumes at once with the same nodes."""
    assert cluster.coordinator is not None
    watch.look()
    before, at = watch.events.steps, time.monotonic()
    cluster.coordinator.kill()
    status = cluster.coordinator.wait()
    workers = {name: cluster.worker(name) for name in cluster.alive()}
    run = cluster.launch("run", {"train.max_hours": 10, "train.save_every": 1}, resume=True)
    again = Watch(Events(cluster.folder / "run" / "metrics.jsonl"), lambda: run.poll() is not None)
    again.until(lambda: again.events.steps > before, "a step of the resumed run")
    return {
        "exit_status": status,
        "last_step_before": before,
        "seconds_to_the_next_step": round(time.monotonic() - at, 2),
        "steps_done_again": sum(
            event.get("steps_again", 0) for event in again.events.told if event["event"] == "stage"
        ),
        "workers_kept": sum(cluster.worker(name) == worker for name, worker in workers.items()),
    }


if __name__ == "__main__":
    main()
