"""A small office in Linux network namespaces: a coordinator and nodes, each node on a cable that a test can cut.

    mlxd-XXX-0  coordinator 10.77.0.1 ─┬─ n1 ══ bridge "cable1" in mlxd-XXX-1 ══ eth0 ─ node 10.77.0.2 in mlxd-XXX-2
                  (bridge "office")    └─ n2 ══ …

Packets are lost in the middle of a cable, where neither end can see it: no reset, no error, no lost carrier. Nothing is
made outside these namespaces, so removing them removes everything.
"""

import ctypes
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from mlxdist.coordinator.config.hosts import CoordinatorHost, Hosts
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.run import run
from mlxdist.keys.store import FOLDER, KeyStore

UP, DOWN = "up", "down"  # node -> coordinator, coordinator -> node
COORDINATOR = "10.77.0.1"
PORT = 5555  # every namespace has all ports to itself
ADDRESS = f"{COORDINATOR}:{PORT}"
CLONE_NEWNET = 0x40000000
LOSE_ALL = ("pfifo", "limit", "0")
DATA_BLOCKED = ("ipproto", "tcp", "dport", str(PORT + 1), "blackhole")


def why_not() -> str:
    """The reason for which this machine cannot make an office; empty when it can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` (iproute2)"
    trial = f"mlxd-{os.getpid()}-trial"
    try:
        _ip("netns", "add", trial)
        _ip("-n", trial, "link", "add", "end0", "type", "veth", "peer", "name", "end1")
        _ip("-n", trial, "link", "add", "bridge0", "type", "bridge")
        _tc(trial, "end0", "tbf", "rate", "5mbit", "burst", "8kb", "limit", "32kb")
        _tc(trial, "end0", *LOSE_ALL)
    except OSError as error:
        return f"no network namespaces here: {error}"
    finally:
        _remove(trial)
    return ""


@dataclass(frozen=True)
class Office:
    """The namespaces, and the number of each node in them."""

    prefix: str
    names: tuple[str, ...]

    def bytes_sent(self, name: str, direction: str) -> int:
        """Bytes that a slowed cable has carried in this direction since it was slowed."""
        said = _run("tc", "-n", self.cables, "-s", "-j", "qdisc", "show", "dev", self._end(name, direction))
        return int(json.loads(said)[0]["bytes"])

    @property
    def coordinator(self) -> str:
        """The coordinator's namespace."""
        return f"{self.prefix}-0"

    @property
    def cables(self) -> str:
        """The namespace that all cables go through."""
        return f"{self.prefix}-1"

    def node(self, name: str) -> str:
        """A node's namespace."""
        return f"{self.prefix}-{self._place(name)}"

    def cut(self, name: str, *directions: str) -> None:
        """Drops every packet of these directions, of both when none is given."""
        for direction in directions or (UP, DOWN):
            _tc(self.cables, self._end(name, direction), *LOSE_ALL)

    def restore(self, name: str) -> None:
        """Lets the cable pass everything again, at full speed."""
        for direction in (UP, DOWN):
            with suppress(OSError):  # nothing was wrong with it
                _run("tc", "-n", self.cables, "qdisc", "del", "dev", self._end(name, direction), "root")

    def block_data(self, name: str) -> None:
        """Blocks the data connection while heartbeats pass, like a firewall that forgot one of the two."""
        _ip("-n", self.node(name), "rule", "add", *DATA_BLOCKED)

    def unblock_data(self, name: str) -> None:
        """Undoes `block_data`; does nothing where nothing was blocked."""
        with suppress(OSError):
            _ip("-n", self.node(name), "rule", "del", *DATA_BLOCKED)

    def slow(self, name: str, mbit: float, *, buffer_kb: int = 32, burst_kb: int = 8) -> None:
        """Slows a cable down to so many Mbit/s each way, with a queue of so many KB in front."""
        rate = ("tbf", "rate", f"{mbit}mbit", "burst", f"{burst_kb}kb", "limit", f"{buffer_kb}kb")
        for direction in (UP, DOWN):
            _tc(self.cables, self._end(name, direction), *rate)

    def ip(self, name: str, *words: str) -> str:
        """Returns the output of `ip` in a node's namespace, or the coordinator's."""
        return _run("ip", "-n", self.coordinator if name == "coordinator" else self.node(name), *words)

    def inside(self, name: str = "") -> AbstractContextManager[None]:
        """Moves this thread, and every thread that it starts, into a node's namespace, or the coordinator's."""
        return _inside(self.node(name) if name else self.coordinator)

    def _place(self, name: str) -> int:
        return self.names.index(name) + 2

    def _end(self, name: str, direction: str) -> str:
        """The end of the cable from which packets of a direction leave."""
        return f"{direction}{self._place(name)}"

    def _build(self) -> None:
        for namespace in (self.coordinator, self.cables, *map(self.node, self.names)):
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")  # a Mac reaches its own addresses
            with _inside(namespace):  # fills a queue until it overflows, as a Mac's does, and every Linux has it
                Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")
        _ip("-n", self.coordinator, "link", "add", "office", "type", "bridge")
        _ip("-n", self.coordinator, "addr", "add", f"{COORDINATOR}/24", "dev", "office")
        _ip("-n", self.coordinator, "link", "set", "office", "up")
        for name in self.names:
            node, place = self.node(name), self._place(name)
            up, down = self._end(name, UP), self._end(name, DOWN)
            _ip("-n", self.cables, "link", "add", f"cable{place}", "type", "bridge")
            for end, there, port in ((up, self.coordinator, f"n{place}"), (down, node, "eth0")):
                _ip("-n", self.cables, "link", "add", end, "type", "veth", "peer", "name", port, "netns", there)
                _ip("-n", self.cables, "link", "set", end, "master", f"cable{place}", "up")
            _ip("-n", self.coordinator, "link", "set", f"n{place}", "master", "office", "up")
            _ip("-n", node, "addr", "add", f"10.77.0.{place}/24", "dev", "eth0")
            _ip("-n", node, "link", "set", "eth0", "up")
            _ip("-n", self.cables, "link", "set", f"cable{place}", "up")

    def _remove(self) -> None:
        for namespace in (self.coordinator, self.cables, *map(self.node, self.names)):
            _remove(namespace)


@contextmanager
def office(names: Sequence[str]) -> Iterator[Office]:
    """An office for these nodes, removed after the block. Raises OSError where it cannot be made."""
    made = Office(f"mlxd-{secrets.token_hex(3)}", tuple(names))  # a process may have two
    try:
        made._build()
        yield made
    finally:
        made._remove()


@dataclass
class OfficeNodes:
    """Nodes started by hand, each in its own namespace, with a home and a key of its own that was admitted."""

    logs: Path
    office: Office
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    @property
    def store(self) -> KeyStore:
        """The keys of the coordinator's Mac."""
        return KeyStore(self.home("coordinator") / FOLDER)

    def home(self, name: str) -> Path:
        """The home folder on a node's Mac."""
        return self.logs / "homes" / name

    def log(self, name: str) -> str:
        """All that a node's supervisor has printed."""
        return (self.logs / f"{name}.txt").read_text()

    def public(self, name: str) -> str:
        """The public key of a node's Mac."""
        return KeyStore(self.home(name) / FOLDER).own_pair().public

    def admit(self, name: str) -> None:
        """Admits a node by its own key, as a person does with `mlxdist key` and `mlxdist nodes admit`."""
        self.store.admit(name, self.public(name), now=datetime.now(UTC))

    def environment(self, name: str) -> dict[str, str]:
        """The environment on a Mac of the office."""
        return {**os.environ, "MLX_DISABLE_COMPILE": "1", "HOME": str(self.home(name))}

    def start(self, name: str, *options: str, called: str = "", home: str = "", connect: str = ADDRESS) -> None:
        """Starts a node on the Mac `name`, under another name where it is `called` so, with the key of a Mac's home.

        Without `options` it has the key of the coordinator.
        """
        here = ["ip", "netns", "exec", self.office.node(name)]  # it becomes the command that follows
        node = [sys.executable, "-m", "mlxdist", "node", "--connect", connect, "--wait", "20m"]
        options = options or ("--coordinator", self.store.coordinator_pair().public)
        with (self.logs / f"{name}.txt").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*here, *node, "--name", called or name, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment(home or name),
            )

    def end(self, name: str) -> None:
        """Kills the supervisor on a Mac; its worker ends with it."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def train(self, config: RunConfig, min_nodes: int, *, resume: bool = False) -> int:
        """Trains one run, with the coordinator in this process and in the coordinator's namespace."""
        hosts = Hosts(None, CoordinatorHost(bind=COORDINATOR, port=PORT, min_nodes=min_nodes), ())
        with self.office.inside():
            return run(config, hosts, resume=resume, environ={"MLXDIST_PLAIN": "1"}, keys=self.store)

    def stop(self) -> None:
        """Ends all nodes; a worker ends with its supervisor."""
        for name in list(self.processes):
            self.end(name)


@contextmanager
def office_nodes(logs: Path, *names: str, others: Sequence[str] = ()) -> Iterator[OfficeNodes]:
    """An office with these nodes, and other Macs on which nothing runs; removed after the block.

    Raises OSError where it cannot be made.
    """
    with office((*names, *others)) as here:
        nodes = OfficeNodes(logs, here)
        try:
            for name in names:
                nodes.admit(name)
                nodes.start(name)
            yield nodes
        finally:
            nodes.stop()


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _ip(*words: str) -> None:
    _run("ip", *words)


def _tc(namespace: str, device: str, *words: str) -> None:
    _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *words)


def _remove(namespace: str) -> None:
    with suppress(OSError):  # it was never made
        _ip("netns", "del", namespace)


@contextmanager
def _inside(namespace: str) -> Iterator[None]:
    with Path("/proc/thread-self/ns/net").open("rb") as home, Path(f"/run/netns/{namespace}").open("rb") as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(home.fileno())


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
