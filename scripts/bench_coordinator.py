"""Measures the coordinator's own processor time per step, by what it does, and how it grows. Prints JSON.

    python -m scripts.bench_coordinator                         # 1 to 64 nodes, 8 to 512 leaves: some minutes
    python -m scripts.bench_coordinator --nodes 8 16 --leaves 64 --megabytes 8

The fleet, the cluster, the split, the sum and the messages are those of a run, the optimizer and the saved state too.
The nodes are those of scripts/simulated_cluster.py, in memory; their processor time does not count. Each message comes
alone, as when the coordinator is never behind; that costs it most. Heartbeats come every two virtual seconds.

`by`: seconds by kind of work. plan: leaves, the split, and what nodes are given; answers: row outputs, and what is
still missing; watch: heartbeats, silences, sessions; vectors: their blocks, hashed and checked for NaN; sums: of
partials; messages: encoding, decoding, and the way of each to its part. `for_bytes`: of those that grow with a vector.
`calls`: Python functions that the coordinator calls in a step, which do not depend on the load of the machine.
`growth`: the exponent e of n^e between neighboring numbers of nodes (at most leaves), and of leaves (at most nodes).
`share`: of a step of an 8B model on that many M4 minis and cables of 1 Gbit/s, as predicted; beside it the share of a
step without any time on the network. Both mean something for the vectors of that model only (84 MB at rank 8).
"""

import argparse
import cProfile
import json
import math
import pstats
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mlxdist.coordinator.batch.batch_order import Step
from mlxdist.coordinator.batch.micro_batches import cut
from mlxdist.coordinator.config.schema import TrainConfig
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.coordinator.training.clipping import clip
from mlxdist.coordinator.training.optimizer import optimizer_of
from mlxdist.coordinator.training.state import State, save_state
from mlxdist.protocol.leaves import Leaf, Row
from mlxdist.protocol.transport import Parcel
from scripts.local_cluster import machine
from scripts.scaling_models import assumed
from scripts.simulate_cluster import Cell, predict
from scripts.simulated_cluster import SimulatedCluster
from scripts.simulated_office import Mac, Office
from scripts.stopwatch import Stopwatch

TOKENS = 512  # of a leaf
SPEED = 39.0  # tokens per second of a node, for the number of heartbeats in a step: an 8B model on an M4
WHAT = {  # files, by what they do in a step: of the coordinator, and those of libraries that it calls for this alone
    "plan": ("batch_order", "micro_batches", "leaves", "assign", "node_speeds", "placement", "scheduler"),
    "answers": ("answers", "plausible", "nonfinite", "rounds", "assignments", "deadlines", "timeline", "bit_classes"),
    "watch": ("membership", "data_watch", "node", "model_transfer", "offenders", "sleep_detector"),
    "vectors": ("transfers", "uploads", "downloads", "vectors", "_methods"),
    "sums": ("tree", "buffers"),
    "messages": ("wire", "messages", "dispatch", "events", "cluster", "fleet", "transport", "threading"),
    "optimizer": ("clipping", "adamw", "moments", "optimizer", "optimizers"),
    "checkpoint": ("state", "sealed", "run_folder", "numpy", "pathlib"),
}
FOR_BYTES = ("vectors", "sums", "optimizer", "checkpoint")


class MeasuredCluster(SimulatedCluster):
    """A simulated cluster whose coordinator's time is taken."""

    def __init__(self, office: Office) -> None:
        self.watch, self.messages = Stopwatch(), 0
        super().__init__(office)

    def receive(self, timeout: float) -> list[Parcel]:
        """Lets the nodes work while the stopwatch stands."""
        with self.watch.standing():
            arrived = super().receive(timeout)
        self.messages += len(arrived)
        return arrived

    def send(self, parcel: Parcel) -> bool:
        """Hands a message to the modelled network while the stopwatch stands."""
        self.messages += 1
        with self.watch.standing():
            return super().send(parcel)


@dataclass(frozen=True)
class OneRowLeaves:
    """Rows of equal length, as the data of a run."""

    count: int

    @property
    def lengths(self) -> "np.ndarray[Any, np.dtype[np.int32]]":
        """[N] tokens."""
        return np.full(self.count, TOKENS, np.int32)

    labels = None

    def __len__(self) -> int:
        return self.count

    def rows(self, index: int) -> tuple[Row, ...]:
        """Returns the row."""
        return (Row(index, np.ones(TOKENS, np.int32), np.array([0] + [1] * (TOKENS - 1), np.uint8)),)

    def where(self, index: int) -> str:
        """Returns the line."""
        return f"line {index}"


def office(nodes: int, megabytes: float) -> Office:
    """Returns a cluster of equal nodes on links without limits, with vectors of so many 10^6 bytes."""
    elements = max(round(megabytes * 250_000), 1)
    macs = tuple(Mac(f"mini-{place:02}", SPEED) for place in range(nodes))
    return Office(macs, 4 * elements, elements=elements, one_by_one=True)


def one_step(cluster: MeasuredCluster, state: State, rows: OneRowLeaves, folder: RunFolder) -> State:
    """Takes a step as the training loop does, all of it under the stopwatch."""
    optimizer = optimizer_of(TrainConfig())
    with cluster.watch.running():
        leaves: Sequence[Leaf] = cut(Step(state.step + 1, (tuple(range(len(rows))),)), rows, TOKENS).leaves
        cluster.step(state.step, leaves, state.adapter)
        gradient, _ = clip(cluster.gradient, len(rows) * (TOKENS - 1), 1.0)
        adapter, moments = optimizer.update(state.adapter, gradient, state.moments, 1e-4)
        stepped = replace(state, adapter=adapter, moments=moments)
        save_state(folder, stepped, {})
    return stepped


def measure(nodes: int, leaves: int, megabytes: float, folder: RunFolder, steps: int = 2) -> dict[str, Any]:
    """Returns the fastest of some steps after one to warm up, and the shares and calls of one more, profiled."""
    cluster, rows = MeasuredCluster(office(nodes, megabytes)), OneRowLeaves(leaves)
    elements = cluster.office.elements
    zero = np.zeros(elements, np.float32)
    state = State(zero, optimizer_of(TrainConfig()).init(elements))
    state = one_step(cluster, state, rows, folder)
    seconds = []
    for _ in range(steps):
        cluster.watch.seconds, cluster.messages = 0.0, 0
        state = one_step(cluster, state, rows, folder)
        seconds.append(cluster.watch.seconds)
    cluster.watch.profile = cProfile.Profile()
    one_step(cluster, state, rows, folder)
    stats = pstats.Stats(cluster.watch.profile)
    by_what = shares(stats)
    predicted = predict(Cell(nodes=nodes, leaves=leaves), assumed())
    computation = predicted.alone * -(-leaves // nodes) / leaves
    return {
        "nodes": nodes,
        "leaves": leaves,
        "megabytes": megabytes,
        "seconds": round(min(seconds), 5),
        "for_bytes": round(sum(by_what.get(what, 0.0) for what in FOR_BYTES) * min(seconds), 5),
        "share": round(min(seconds) / predicted.step.seconds, 5),
        "share_of_computation": round(min(seconds) / computation, 5),
        "messages": cluster.messages,
        "calls": stats.total_calls,  # type: ignore[attr-defined]
        "by": {what: round(share * min(seconds), 5) for what, share in by_what.items()},
    }


def shares(stats: pstats.Stats) -> dict[str, float]:
    """Returns the share of the time of each kind of work; a built-in function counts for the file that called it."""
    spent: Counter[str] = Counter()
    for (path, _, _), (_, _, own, _, callers) in stats.stats.items():  # type: ignore[attr-defined]
        if "mlxdist" in path or not callers:
            spent[what_of(path)] += own
        else:
            for (caller, *_), (_, _, part, _) in callers.items():
                spent[what_of(caller)] += part
    whole = sum(spent.values()) or 1.0
    return {what: seconds / whole for what, seconds in sorted(spent.items())}


def what_of(path: str) -> str:
    """Returns the kind of work of a file."""
    stem = Path(path).stem
    return next((what for what, stems in WHAT.items() if stem in stems), "other")


def growth(cases: Sequence[Mapping[str, Any]], axis: str) -> list[dict[str, Any]]:
    """Returns the exponents between neighboring cases along `axis`, of the seconds, the calls and each kind of work."""
    found = []
    for small, large in pairwise(sorted(cases, key=lambda case: case[axis])):
        ratio = math.log(large[axis] / small[axis])

        def exponent(before: float, after: float, ratio: float = ratio) -> float | None:
            return round(math.log(after / before) / ratio, 2) if min(before, after) > 1e-4 else None

        by = {what: exponent(small["by"].get(what, 0.0), seconds) for what, seconds in large["by"].items()}
        whole = {key: exponent(small[key], large[key]) for key in ("seconds", "calls", "messages")}
        found.append({"from": small[axis], "to": large[axis], **whole, "by": by})
    return found


def main() -> None:
    """Measures every cluster that was asked for, and prints them as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--leaves", type=int, nargs="+", default=[8, 64, 128, 256, 512])
    parser.add_argument("--megabytes", type=float, default=8.4, help="10^6 bytes of a vector")
    given = parser.parse_args()
    most_nodes, most_leaves = max(given.nodes), max(given.leaves)
    wanted = {(nodes, most_leaves) for nodes in given.nodes} | {(most_nodes, leaves) for leaves in given.leaves}
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name))
        folder.state.mkdir(parents=True)
        cases = [measure(nodes, leaves, given.megabytes, folder) for nodes, leaves in sorted(wanted)]
    grown = {
        "nodes": growth([case for case in cases if case["leaves"] == most_leaves], "nodes"),
        "leaves": growth([case for case in cases if case["nodes"] == most_nodes], "leaves"),
    }
    print(json.dumps({"machine": machine(), "cases": cases, "growth": grown}, indent=1))


if __name__ == "__main__":
    main()
