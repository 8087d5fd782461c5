"""Four "Macs" on a switch, in Linux network namespaces, each with a real sshd, a login shell and a home of its own.

    hub      10.77.0.2   the coordinator, on a cable as the others
    mini-1   10.77.0.3   fish; its sshd shows a Banner
    mini-2   10.77.0.4   csh; a space in HOME
    mini-3   10.77.0.5   bash that prints text on both streams
    mini-4   10.77.0.6   sh; no rsync

    python scripts/cluster_bed.py                        # prints how to use the bed, and keeps it until Ctrl-C
    python scripts/cluster_bed.py mlxdist doctor …       # runs a command on the coordinator, then removes the bed
    python scripts/cluster_bed.py --internet mlxdist sync …    # the same, with this machine's own network as well

All cables have 1 Gbit/s, and nothing leads out of the office. Users, shells and a missing
program are bind mounts that only the sshd of that Mac and its children see, so nothing of this system is changed, and
the bed is gone when its processes are. It needs Linux, root, ip, tc, sshd, ssh, rsync, fish and csh.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlxdist.coordinator.sync.downloads import cache_folder
from scripts.cluster_bed_macs import MACS, TOOLS, UID, Mac, make_key, start_server, where, write_client
from tests.faults.namespaces import Office, office
from tests.faults.namespaces import why_not as no_namespaces

HUB = "hub"
MBIT, BURST_KB, BUFFER_KB = 1000, 256, 1024  # a gigabit switch; the burst lets tbf reach its rate at any timer
START_SECONDS = 20.0


@dataclass(frozen=True)
class Bed:
    """The Macs, running. Everything of theirs lies in `folder`."""

    folder: Path
    office: Office
    macs: tuple[Mac, ...]
    servers: Mapping[str, "subprocess.Popen[bytes]"]

    @property
    def ssh_config(self) -> Path:
        """The configuration of the coordinator's ssh client."""
        return self.folder / "ssh_config"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a command on the coordinator: `ssh` reads the bed's configuration, and HOME is empty."""
        return {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.folder / HUB),
            # of this user, since downloads are configured there
            "MLXDIST_CACHE": str(cache_folder(os.environ)),
            "XDG_CONFIG_HOME": str(Path.home() / ".config"),
            "XDG_CACHE_HOME": str(Path.home() / ".cache"),
        }

    def home(self, name: str) -> Path:
        """The home of the user on a Mac."""
        return self.folder / name / next(mac.home for mac in self.macs if mac.name == name)

    def address(self, name: str) -> str:
        """The IPv4 address of a Mac."""
        return f"10.77.0.{self.office.names.index(name) + 2}"

    def limit(self, mbit: float) -> None:
        """Gives every cable so many Mbit/s in each direction."""
        for name in self.office.names:
            self.office.slow(name, mbit, burst_kb=BURST_KB, buffer_kb=BUFFER_KB)

    def here(self, *command: str) -> list[str]:
        """Returns the command that runs `command` in the coordinator's namespace."""
        return ["ip", "netns", "exec", self.office.node(HUB), *command]

    def run(
        self, *command: str, timeout: float = 300.0, cwd: Path | None = None, internet: bool = False
    ) -> "subprocess.CompletedProcess[str]":
        """Runs a command on the coordinator and returns its output and exit code.

        `internet`: in this machine's own network, from where only ssh reaches the Macs.
        """
        return subprocess.run(
            command if internet else self.here(*command),
            env=self.environment,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def inside(self, name: str, *command: str) -> str:
        """Runs a command as root where the sshd of a Mac runs, with its mounts; returns what it printed.

        Raises OSError when the command fails.
        """
        there = ["nsenter", "--target", str(self.servers[name].pid), "--mount", "--net", "--uts", "--", *command]
        done = subprocess.run(there, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{name}: {' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def give(self, name: str, folder: Path) -> None:
        """Gives everything in a folder to the user of a Mac."""
        self.inside(name, "chown", "-R", f"{UID}:{UID}", str(folder))

    def processes(self, name: str) -> list[int]:
        """The processes of a Mac, but its sshd."""
        return [pid for pid in _pids(self.office.node(name)) if pid != self.servers[name].pid]


def why_not() -> str:
    """The reason for which this machine cannot make a bed; empty when it can. Installs nothing."""
    missing = [package for tool, package in TOOLS.items() if where(tool) is None]
    return no_namespaces() or (f"install {' '.join(missing)}" if missing else "")


@contextmanager
def cluster_bed(folder: Path, macs: Sequence[Mac] = MACS, mbit: float = MBIT) -> Iterator[Bed]:
    """The Macs for a block; every process of theirs ends with it. `folder` must be readable for every user.

    Raises OSError where they cannot be made.
    """
    (folder / HUB).mkdir(parents=True)
    make_key(folder / "id")
    with office([HUB, *(mac.name for mac in macs)]) as place:
        servers: dict[str, subprocess.Popen[bytes]] = {}
        bed = Bed(folder, place, tuple(macs), servers)
        try:
            bed.limit(mbit)
            for mac in macs:
                servers[mac.name] = start_server(folder, mac, place.node(mac.name))
            write_client(folder, {mac.name: bed.address(mac.name) for mac in macs}, bed.here())
            for mac in macs:
                _wait_for(bed, mac)
            yield bed
        finally:
            _end(bed)


def _wait_for(bed: Bed, mac: Mac) -> None:
    """Waits until a Mac answers at its port for ssh. Raises OSError when its sshd has ended or does not answer."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and bed.servers[mac.name].poll() is None:
        with suppress(OSError), bed.office.inside(HUB):
            socket.create_connection((bed.address(mac.name), 22), timeout=1).close()
            return
        time.sleep(0.05)
    raise OSError(f"{mac.name}: its sshd does not answer:\n{(bed.folder / mac.name / 'sshd.log').read_text()}")


def _end(bed: Bed) -> None:
    """Ends every process in the bed's namespaces, those that outlived their connection too."""
    for namespace in (bed.office.coordinator, *map(bed.office.node, bed.office.names)):
        for pid in _pids(namespace):
            if pid != os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    for server in bed.servers.values():
        server.kill()
        server.wait()


def _pids(namespace: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(word) for word in done.stdout.split()]


def main(command: Sequence[str]) -> int:
    """Makes a bed, runs `command` on its coordinator or waits for Ctrl-C, and removes the bed."""
    if reason := why_not():
        print(f"no bed: {reason}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the bed is removed
    with tempfile.TemporaryDirectory(prefix="mlxd-bed-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with cluster_bed(folder) as bed:
            if command:
                words = command[1:] if command[0] == "--internet" else bed.here(*command)
                return subprocess.run(words, env=bed.environment, check=False).returncode
            print(f"the Macs: {', '.join(mac.name for mac in bed.macs)}; the coordinator is {bed.address(HUB)}")
            print(f"a shell on the coordinator: PATH={bed.folder / 'bin'}:$PATH {' '.join(bed.here('sh'))}")
            print("Ctrl-C removes everything")
            with suppress(KeyboardInterrupt):
                signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
