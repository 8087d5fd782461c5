"""Measures what encryption costs: 40 MB vectors from nodes to a coordinator over loopback, as JSON.

    python scripts/bench_curve.py
    python scripts/bench_curve.py --megabytes 160 --nodes 1 4 --times 7

Each node is a process with our own link, the coordinator our own hub. A node sends blocks of 1 MiB, eight ahead of what
was received, as in a run; nothing is hashed or added up. Plain and encrypted alternate, and the median counts. On real
Macs the cables are slower than loopback, and the two ends do not share their cores.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import zmq

from mlxdist.coordinator.fleet.access import Access
from mlxdist.coordinator.fleet.sockets import RouterHub
from mlxdist.keys.pair import NodeKeys, new_pair
from mlxdist.keys.store import KeyStore
from mlxdist.node.link.sockets import DealerLink
from mlxdist.protocol.transport import DATA, Parcel
from mlxdist.protocol.vectors import WINDOW

HERE = "127.0.0.1"
BLOCK = bytes(1 << 20)


def node(port: int, name: str, blocks: int, keys: NodeKeys | None) -> None:
    """Sends so many blocks, as credits come, and ends when the coordinator says so."""
    link = DealerLink(f"tcp://{HERE}:{port}", name.encode(), keys=keys)
    while not link.send([b"hello", b""]):
        link.receive(0.01)
    upto = sent = 0
    while True:
        for frames in link.receive(0.5):
            if bytes(frames[0]) == b"end":
                link.close()
                return
            upto = int(bytes(frames[0]))
        while sent < min(upto, blocks):
            link.send([b"block", BLOCK])
            sent += 1


def once(nodes: int, blocks: int, io_threads: int, *, encrypted: bool) -> float:
    """The seconds from the first credit until all blocks of all nodes are here."""
    access = Access(new_pair(), KeyStore(Path("none"))) if encrypted else None
    hub = RouterHub([HERE], 0, access, io_threads=io_threads)
    names = [f"node-{number}" for number in range(nodes)]
    keys = {name: access.keys_for(name) if access is not None else None for name in names}
    start = multiprocessing.get_context("spawn").Process
    processes = [start(target=node, args=(hub.ports[DATA], name, blocks, keys[name])) for name in names]
    for process in processes:
        process.start()
    received: dict[bytes, int] = {}
    while len(received) < nodes:
        for parcel in hub.receive(0.1):
            received[parcel.peer] = 0
            hub.admitted(parcel.waiting)
    began = time.perf_counter()
    for peer in received:
        hub.send(Parcel(DATA, peer, [str(WINDOW).encode(), b""]))
    while min(received.values()) < blocks:
        for parcel in hub.receive(0.5):
            received[parcel.peer] += 1
            hub.send(Parcel(DATA, parcel.peer, [str(received[parcel.peer] + WINDOW).encode(), b""]))
    seconds = time.perf_counter() - began
    for peer in received:
        hub.send(Parcel(DATA, peer, [b"end", b""]))
    for process in processes:
        process.join()
    hub.close()
    return seconds


def measure(nodes: int, io_threads: int, megabytes: int, times: int) -> dict[str, Any]:
    """The median seconds of one vector from each of so many nodes, without and with encryption."""
    blocks = -(-megabytes * 10**6 // len(BLOCK))
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * times):
        seconds[number % 2 == 1].append(once(nodes, blocks, io_threads, encrypted=number % 2 == 1))
    plain, encrypted = (statistics.median(seconds[kind]) for kind in (False, True))
    total = nodes * blocks * len(BLOCK) / 1e9
    return {
        "nodes": nodes,
        "io_threads": io_threads,
        "plain_seconds": round(plain, 4),
        "encrypted_seconds": round(encrypted, 4),
        "plain_gb_per_second": round(total / plain, 3),
        "encrypted_gb_per_second": round(total / encrypted, 3),
    }


def main() -> None:
    """Reads the command line and prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--megabytes", type=int, default=40)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--io-threads", type=int, nargs="+", default=[1, 2], help="of the coordinator")
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    result = {
        "megabytes": options.megabytes,
        "times": options.times,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "libzmq": zmq.zmq_version(),
        "results": [
            measure(nodes, threads, options.megabytes, options.times)
            for nodes in options.nodes
            for threads in options.io_threads
        ],
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
