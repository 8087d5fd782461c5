"""Measures a step while the coordinator sends its model to one more Mac, beside a step without that. Prints JSON.

    python -m scripts.bench_model                                         # 20, 100 and 1000 Mbit/s: some minutes
    python -m scripts.bench_model --mbit 100 --megabytes 10 --steps 4

The bed and the nodes are those of scripts/bench_cluster.py: on every cable, that of the coordinator too, so many Mbit/s
in each direction. The Mac that gets the model is a real `mlxdist node` with an empty home. Steps with and without it
alternate, `--rounds` times. `rate` is what it gets meanwhile, in MB/s.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import count
from pathlib import Path
from statistics import median

from mlxdist.coordinator.cluster.cluster import Cluster
from mlxdist.coordinator.cluster.settings import ClusterSettings
from mlxdist.coordinator.config.run_spec import run_spec
from mlxdist.coordinator.config.schema import DataConfig, RunConfig
from mlxdist.coordinator.fleet.access import Access
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.fleet.model_source import ModelSource
from mlxdist.coordinator.fleet.sockets import RouterHub
from mlxdist.keys.pair import new_pair
from mlxdist.keys.store import FOLDER, KeyStore
from mlxdist.protocol.states import NodeState
from mlxdist.protocol.transport import DATA
from scripts.bench_cluster import PATIENT, PORT, Case, equal_shares, nodes, one_step
from scripts.cluster_bed import HUB, Bed, cluster_bed, why_not
from scripts.cluster_bed_macs import MACS
from scripts.local_cluster import machine

MODEL_BYTES = 2_000_000_000  # sparse, and more than is sent in any case
START_SECONDS = 600.0


@dataclass(frozen=True)
class Measured:
    """The median seconds of a step without and with the transfer, and what the new Mac got meanwhile, in MB/s."""

    without: float
    sending: float
    ratio: float
    rate: float


@contextmanager
def joiner(bed: Bed, name: str, access: Access, home: Path) -> Iterator[None]:
    """A node with an empty home, for a block."""
    store = KeyStore(home / FOLDER)
    access.launched[store.own_pair().public] = name
    words = ["-m", "mlxdist", "node", "--name", name, "--connect", f"{bed.address(HUB)}:{PORT}", "--coordinator"]
    process = subprocess.Popen(
        ["ip", "netns", "exec", bed.office.node(name), sys.executable, *words, access.server.public],
        env={**os.environ, "HOME": str(home), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def bytes_at(home: Path) -> int:
    """Returns the bytes of the model that have come to a home."""
    return sum(path.stat().st_size for path in (home / "mlxdist" / "models").glob("*/*"))


def measure(bed: Bed, case: Case, folder: Path, steps: int, rounds: int) -> Measured:
    """Returns the medians over all rounds; each has so many steps without and with the transfer."""
    bed.limit(case.mbit)
    names = [mac.name for mac in bed.macs]
    access = Access(new_pair(), KeyStore(bed.folder / "keys"))
    without, sending, rates = list[float](), list[float](), list[float]()
    with ExitStack() as stack:
        stack.enter_context(bed.office.inside(HUB))
        hub = RouterHub(["*"], PORT, access)
        settings = ClusterSettings(
            run="bench",
            incarnation=time.time_ns(),
            spec=run_spec(RunConfig(model="none", output=bed.folder, data=DataConfig(path="none"))),
            versions={name: version(name) for name in ("mlx", "mlx-lm")},
            data_port=hub.ports[DATA],
            timing=PATIENT,
        )
        cluster = Cluster(settings, equal_shares)
        fleet = Fleet(cluster, hub, model=ModelSource(folder / "model", folder / "hashes.json"))
        stack.callback(fleet.close, "the measurement is over")
        stack.enter_context(nodes(bed, case, names[: case.nodes], access))
        fleet.wait_for_nodes(case.nodes, case.nodes, START_SECONDS)
        number = count()
        one_step(fleet, case, 4 * case.nodes, next(number))
        for turn in range(rounds):
            without += [one_step(fleet, case, 4 * case.nodes, next(number)) for _ in range(steps)]
            with tempfile.TemporaryDirectory(dir=folder) as home, joiner(bed, names[-1], access, Path(home)):
                wait_until_it_comes(Path(home))
                began, before = time.perf_counter(), bytes_at(Path(home))
                sending += [one_step(fleet, case, 4 * case.nodes, next(number)) for _ in range(steps)]
                rates.append((bytes_at(Path(home)) - before) / (time.perf_counter() - began) / 1e6)
                assert cluster.nodes[names[-1]].state is NodeState.FETCHING, f"the transfer ended in round {turn}"
    return Measured(median(without), median(sending), median(sending) / median(without), median(rates))


def make_model(folder: Path, size: int) -> None:
    """Writes files of a model's names, of so many bytes, of which the disk holds almost none."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    with (folder / "model" / "model.safetensors").open("wb") as stream:
        stream.truncate(size)


def wait_until_it_comes(home: Path) -> None:
    """Waits for the first block at the new Mac."""
    until = time.monotonic() + START_SECONDS
    while bytes_at(home) < 1 << 20:
        if time.monotonic() > until:
            sys.exit("bench_model: nothing has come to the new Mac")
        time.sleep(0.05)


def main() -> None:
    """Measures every case, and prints them as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mbit", type=int, nargs="+", default=[20, 100, 1000])
    parser.add_argument("--megabytes", type=int, default=10, help="10^6 bytes of an adapter")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--leaf-seconds", type=float, default=0.25)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if reason := why_not():
        sys.exit(f"bench_model: {reason}")
    found = []
    with tempfile.TemporaryDirectory(prefix="mlxd-bed-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        make_model(folder, MODEL_BYTES)
        with cluster_bed(folder / "macs", MACS) as bed:
            for mbit in given.mbit:
                case = Case(mbit, "curve", given.megabytes, given.nodes, given.leaf_seconds)
                measured = asdict(measure(bed, case, folder, given.steps, given.rounds))
                found.append({**asdict(case), **{key: round(value, 3) for key, value in measured.items()}})
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"machine": machine(), "steps": given.steps, "rounds": given.rounds, "cases": found}, indent=1))


if __name__ == "__main__":
    main()
