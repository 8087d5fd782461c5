"""Measures the communication of a step on a star of real cables: plain, CURVE, and through ssh -R. Prints JSON.

    python -m scripts.bench_cluster                                   # everything: about an hour
    python -m scripts.bench_cluster --mbit 1000 --megabytes 40 --nodes 4 --transports plain

On the bed of scripts/cluster_bed.py every cable, that of the coordinator too, has the given rate in each direction. The
nodes are the real processes; only the computation is replaced by a wait. A step sends the adapter to every node, waits
for the leaves, and receives the partials.

The bound of a star is the time that the coordinator's cable needs for the bytes of the vectors, one direction after the
other: (nodes + partials) * bytes / rate. Frames cost another 4.5 % on a cable, which it leaves out. A cable carries
both directions at once, so that a step can stay below this bound: the first nodes compute and send while the last ones
receive. `least` is the bound of that: one adapter, then all partials.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import count, pairwise, product
from pathlib import Path
from statistics import median

import numpy as np

from mlxdist.coordinator.cluster.cluster import Cluster
from mlxdist.coordinator.cluster.settings import ClusterSettings
from mlxdist.coordinator.config.run_spec import run_spec
from mlxdist.coordinator.config.schema import DataConfig, RunConfig, TimingConfig
from mlxdist.coordinator.fleet.access import Access
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.fleet.sockets import RouterHub
from mlxdist.coordinator.schedule.assign import NodeSeconds
from mlxdist.coordinator.schedule.rounds import Request
from mlxdist.keys.pair import keys_line, new_pair
from mlxdist.keys.store import KeyStore
from mlxdist.protocol.leaves import Leaf, Row
from mlxdist.protocol.transport import DATA
from mlxdist.protocol.tree import Span
from scripts.bench_cluster_node import COMMAND, SETTINGS
from scripts.cluster_bed import HUB, Bed, cluster_bed, why_not
from scripts.cluster_bed_macs import MACS, Mac
from scripts.local_cluster import machine

PORT = 5555
TRANSPORTS = ("plain", "curve", "ssh")
MORE = (0, 3)  # leaves beyond four for each node: none gives one partial per node, three give two or three
PATIENT = TimingConfig(copy_factor=1000.0, progress_seconds=600.0, dead_seconds=300.0, suspect_seconds=200.0)


@dataclass(frozen=True)
class Case:
    """One cluster to measure."""

    mbit: int
    transport: str
    megabytes: int  # 10^6 bytes of a vector
    nodes: int
    leaf_seconds: float


@dataclass(frozen=True)
class Measured:
    """The median over the steps of a case, in seconds, and the fastest: other work on the machine only adds to it."""

    leaves: int
    partials: int
    step: float
    compute: float  # of the node with most leaves
    communication: float  # the step without the computation
    bound: float  # of a star, one direction after the other
    least: float  # with both at once
    ratio: float  # communication to bound
    fastest_ratio: float


def macs(count: int) -> tuple[Mac, ...]:
    """Returns the Macs of the bed, and as many plain ones more as make `count`."""
    return (*MACS, *(Mac(f"mini-{place}", "sh") for place in range(len(MACS) + 1, count + 1)))


@contextmanager
def tunnels(bed: Bed, names: Sequence[str], more: Sequence[str]) -> Iterator[None]:
    """Both ports of the coordinator on each Mac's own loopback, through ssh -R, for a block."""
    ports = [word for port in (PORT, PORT + 1) for word in ("-R", f"127.0.0.1:{port}:127.0.0.1:{port}")]
    options = ["-o", "BatchMode=yes", "-o", "ExitOnForwardFailure=yes", *more, "-N", *ports]
    running = [subprocess.Popen(bed.here("ssh", *options, name), env=bed.environment) for name in names]
    try:
        yield
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


@contextmanager
def nodes(bed: Bed, case: Case, names: Sequence[str], access: Access | None) -> Iterator[None]:
    """The nodes of a case, for a block."""
    host = "127.0.0.1" if case.transport == "ssh" else bed.address(HUB)
    environ = {**os.environ, SETTINGS: f"{case.megabytes * 250_000} {case.leaf_seconds}"}
    running = []
    try:
        for name in names:
            command = ["ip", "netns", "exec", bed.office.node(name), sys.executable, *COMMAND, name, host, str(PORT)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environ)
            running.append(process)
            assert process.stdin is not None
            with process.stdin:
                process.stdin.write(keys_line(access.keys_for(name) if access is not None else None))
        yield
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def equal_shares(nodes: Mapping[str, NodeSeconds], span: Span | None = None) -> dict[str, Span]:
    """Returns spans of equal length, whatever the speeds: the measured leaves are the same in every step."""
    whole = span or Span(0, len(next(iter(nodes.values())).leaves))
    edges = [whole.start + len(whole) * place // len(nodes) for place in range(len(nodes) + 1)]
    return {name: Span(*edge) for name, edge in zip(nodes, pairwise(edges), strict=True) if edge[0] < edge[1]}


def measure(
    bed: Bed, case: Case, steps: int, more: Sequence[int] = MORE, ssh_options: Sequence[str] = ()
) -> Iterator[Measured]:
    """Yields a measurement for each number of leaves: four for each node, and so many `more`.

    Without more, each node sends one partial. Each measurement is a step to warm up, and then `steps` of them.
    """
    bed.limit(case.mbit)
    names = [mac.name for mac in bed.macs][: case.nodes]
    access = Access(new_pair(), KeyStore(bed.folder / "keys")) if case.transport == "curve" else None
    with ExitStack() as stack:
        stack.enter_context(bed.office.inside(HUB))
        hub = RouterHub(["*"], PORT, access)
        config = RunConfig(model="none", output=bed.folder, data=DataConfig(path="none"))
        settings = ClusterSettings(
            run="bench",
            incarnation=time.time_ns(),
            spec=run_spec(config),
            versions={name: version(name) for name in ("mlx", "mlx-lm")},
            data_port=hub.ports[DATA],
            timing=PATIENT,
        )
        cluster = Cluster(settings, equal_shares)
        fleet = Fleet(cluster, hub)
        stack.callback(fleet.close, "the measurement is over")
        if case.transport == "ssh":
            stack.enter_context(tunnels(bed, names, ssh_options))
        stack.enter_context(nodes(bed, case, names, access))
        fleet.wait_for_nodes(case.nodes, case.nodes, 120)
        number = count()
        for leaves in (4 * case.nodes + each for each in more):
            seconds = [one_step(fleet, case, leaves, next(number)) for _ in range(steps + 1)][1:]
            assert cluster.round is not None
            yield summary(case, leaves, seconds, cluster.round.senders)


def one_step(fleet: Fleet, case: Case, leaves: int, number: int) -> float:
    """Returns the seconds of a step: adapter down, leaves, partials up."""
    row = Row(0, np.ones(8, np.int32), np.array([0] + [1] * 7, np.uint8))
    asked = tuple(Leaf(index, (row,)) for index in range(leaves))
    adapter = np.full(case.megabytes * 250_000, number, np.float32)
    began = time.perf_counter()
    fleet.send_adapter(number, adapter)
    fleet.gradient(Request("gradient", number + 1, number, asked))
    return time.perf_counter() - began


def summary(case: Case, leaves: int, seconds: Sequence[float], senders: Mapping[Span, str]) -> Measured:
    """Returns the median of the steps, against the bound. `senders`: the node of each partial."""
    work: Counter[str] = Counter()
    for span, name in senders.items():
        work[name] += len(span)
    step, compute = median(seconds), max(work.values()) * case.leaf_seconds
    one, communication = case.megabytes * 8 / case.mbit, step - compute
    bound, least = (case.nodes + len(senders)) * one, (1 + len(senders)) * one
    fastest = (min(seconds) - compute) / bound
    return Measured(leaves, len(senders), step, compute, communication, bound, least, communication / bound, fastest)


def main() -> None:
    """Measures every case that was asked for, and prints them as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mbit", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 40, 160])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--transports", nargs="+", default=TRANSPORTS, choices=TRANSPORTS)
    parser.add_argument("--leaf-seconds", type=float, default=0.25, help="computation of a leaf")
    parser.add_argument("--more", type=int, nargs="+", default=MORE, help="leaves beyond four for each node")
    parser.add_argument("--ssh-options", default="", help="further words for ssh, as '-o Ciphers=aes128-ctr'")
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    if reason := why_not():
        sys.exit(f"bench_cluster: {reason}")
    found = []
    with tempfile.TemporaryDirectory(prefix="mlxd-bed-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with cluster_bed(folder / "macs", macs(max(given.nodes))) as bed:
            for values in product(given.mbit, given.transports, given.megabytes, given.nodes):
                case = Case(*values, given.leaf_seconds)
                for measured in measure(bed, case, given.steps, given.more, given.ssh_options.split()):
                    found.append({**asdict(case), **{key: round(value, 3) for key, value in asdict(measured).items()}})
                    print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"machine": machine(), "steps": given.steps, "cases": found}, indent=1))


if __name__ == "__main__":
    main()
