"""Real nodes (supervisors and workers), started by hand once per test session, which serve one run after another."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mlxdist.coordinator.config.hosts import CoordinatorHost, Hosts
from scripts.local_cluster import free_ports


@dataclass
class Pools:
    """Pools of nodes by size, each at its own port, started when first asked for."""

    logs: Path
    ports: dict[int, int] = field(default_factory=dict)
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def hosts(self, size: int) -> Hosts:
        """A cluster of exactly `size` nodes that wait for their next coordinator."""
        if size not in self.ports:
            self.ports[size] = free_ports()
            for index in range(size):
                self.processes.append(start_node(self.ports[size], f"pool{size}-{index}", self.logs))
        return Hosts(None, CoordinatorHost(port=self.ports[size], min_nodes=size), ())


def start_node(
    port: int, name: str, logs: Path, *, host: str = "127.0.0.1", environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Starts one node, as a person would by hand."""
    with (logs / f"{name}.txt").open("ab") as log:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "mlxdist",
                "node",
                "--connect",
                f"{host}:{port}",
                "--name",
                name,
                "--wait",
                "20m",
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "MLX_DISABLE_COMPILE": "1", **(environment or {})},
        )


@contextmanager
def node_pools(logs: Path) -> Iterator[Pools]:
    """Pools that end with the block."""
    pools = Pools(logs)
    try:
        yield pools
    finally:
        for process in pools.processes:
            process.terminate()
        for process in pools.processes:
            process.wait()
