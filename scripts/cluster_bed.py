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
import shutil
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
from tests.faults.namespaces import Office, office
from tests.faults.namespaces import why_not as no_namespaces

HUB = "hub"
USER, UID = "mac", 64123
MBIT, BURST_KB, BUFFER_KB = 1000, 256, 1024  # a gigabit switch; the burst lets tbf reach its rate at any timer
START_SECONDS = 20.0
BANNER = "Property of the office. Authorized use only.\n"
TALK = 'echo "Welcome back!"\necho "It is a fine day." >&2\n'
TOOLS = {"sshd": "openssh-server", "ssh": "openssh-client", "rsync": "rsync", "fish": "fish", "csh": "csh"}
SSHD = """
ListenAddress 0.0.0.0
HostKey {folder}/host_key
PidFile none
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
AuthorizedKeysFile {folder}/authorized_keys
StrictModes no
AllowTcpForwarding yes
MaxStartups 100
{more}
"""


@dataclass(frozen=True)
class Mac:
    """One host of the bed: its name, its login shell, and its peculiarities."""

    name: str
    shell: str
    home: str = "home"  # folder of the user, under the Mac's own
    banner: bool = False
    talks: bool = False  # its shell prints text whenever it starts
    hidden: tuple[str, ...] = ()  # programs that it does not have


MACS = (
    Mac("mini-1", "fish", banner=True),
    Mac("mini-2", "csh", home="home of mini"),
    Mac("mini-3", "bash", talks=True),
    Mac("mini-4", "sh", hidden=("rsync",)),
)


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
    missing = [package for tool, package in TOOLS.items() if _where(tool) is None]
    return no_namespaces() or (f"install {' '.join(missing)}" if missing else "")


@contextmanager
def cluster_bed(folder: Path, macs: Sequence[Mac] = MACS, mbit: float = MBIT) -> Iterator[Bed]:
    """The Macs for a block; every process of theirs ends with it. `folder` must be readable for every user.

    Raises OSError where they cannot be made.
    """
    (folder / HUB).mkdir(parents=True)
    _key(folder / "id")
    with office([HUB, *(mac.name for mac in macs)]) as place:
        servers: dict[str, subprocess.Popen[bytes]] = {}
        bed = Bed(folder, place, tuple(macs), servers)
        try:
            bed.limit(mbit)
            for mac in macs:
                servers[mac.name] = _start(bed, mac)
            _write_client(bed)
            for mac in macs:
                _wait_for(bed, mac)
            yield bed
        finally:
            _end(bed)


def _start(bed: Bed, mac: Mac) -> "subprocess.Popen[bytes]":
    """Starts the sshd of a Mac in its namespaces."""
    folder, home = bed.folder / mac.name, bed.home(mac.name)
    home.mkdir(parents=True)
    shell = _where(mac.shell) or ""
    _key(folder / "host_key")
    (folder / "authorized_keys").write_text((bed.folder / "id.pub").read_text())
    (folder / "banner").write_text(BANNER)
    more = f"Banner {folder / 'banner'}" if mac.banner else ""
    (folder / "sshd_config").write_text(SSHD.format(folder=folder, more=more))
    if mac.talks:
        (home / ".bashrc").write_text(TALK)  # bash reads it when sshd has started it
    person = f"{USER}:x:{UID}:{UID}::{home}:{shell}"
    for name, line in (("passwd", person), ("shadow", f"{USER}:*:19000:0:99999:7:::"), ("group", f"{USER}:x:{UID}:")):
        system = Path("/etc", name).read_text().splitlines()
        kept = [old for old in system if not old.startswith(f"{USER}:")]
        (folder / name).write_text("\n".join([*kept, line, ""]))
    for path in (home, *home.iterdir()):
        os.chown(path, UID, UID)
    (folder / "run").mkdir()
    steps = [f"hostname {mac.name}", "mount -t tmpfs -o mode=755 tmpfs /run && mkdir /run/sshd"]
    steps += [f"mount --bind {folder / name} /etc/{name}" for name in ("passwd", "shadow", "group")]
    steps += [f"mount --bind /dev/null {path}" for tool in mac.hidden if (path := _where(tool))]
    script = " && ".join([*steps, f"exec {_where('sshd')} -D -e -f {folder / 'sshd_config'}"])
    with (folder / "sshd.log").open("ab") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", bed.office.node(mac.name), "unshare", "--uts", "sh", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={"PATH": os.environ["PATH"]},
            start_new_session=True,
        )


def _write_client(bed: Bed) -> None:
    """Writes the coordinator's ssh configuration, its known hosts, and an `ssh` that reads them."""
    known, blocks = [], []
    for mac in bed.macs:
        key = (bed.folder / mac.name / "host_key.pub").read_text()
        known.append(f"{mac.name},{bed.address(mac.name)} {key}")
        blocks.append(f"Host {mac.name}\n  HostName {bed.address(mac.name)}\n  User {USER}\n")
    (bed.folder / "known_hosts").write_text("".join(known))
    both = (
        f"  IdentityFile {bed.folder / 'id'}\n  UserKnownHostsFile {bed.folder / 'known_hosts'}\n  HashKnownHosts no\n"
    )
    # A command outside the coordinator's namespace reaches the Macs too: the socket is opened inside, and handed out.
    inside = f"{' '.join(bed.here())} {sys.executable} {bed.folder / 'dial.py'} %h %p"
    both += f"  ProxyUseFdpass yes\n  ProxyCommand {inside}\n"
    bed.ssh_config.write_text("".join([*blocks, "Host *\n", both]))
    (bed.folder / "dial.py").write_text(
        "import socket, sys\n"
        "there = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3)\n"
        "there.settimeout(None)\n"
        "socket.send_fds(socket.socket(fileno=1), [b'.'], [there.fileno()])\n"
    )
    script = bed.folder / "bin" / "ssh"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {_where("ssh")} -F {bed.ssh_config} "$@"\n')
    script.chmod(0o755)


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


def _key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "bed", "-f", str(path)], check=True)


def _where(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def main(command: Sequence[str]) -> int:
    """Makes a bed, runs `command` on its coordinator or waits for Ctrl-C, and removes the bed."""
    if reason := why_not():
        print(f"no bed: {reason}", file=sys.stderr)
        return 2
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
