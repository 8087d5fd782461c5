"""A real sshd on a loopback port, whose only user has a login shell and a home folder of the test's choice.

It runs in a mount namespace of its own, where /etc/passwd is a file of the test: nothing of the machine changes.
"""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from mlxdist.coordinator.launch.ssh import Target

START = "mount --bind {passwd} /etc/passwd && mkdir -p /run/sshd && exec {sshd} -D -e -f {config}"


def why_not() -> str:
    """The reason for which this machine cannot start one; empty when it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "sshd with a shell of its own needs root on Linux"
    missing = [tool for tool in ("sshd", "ssh", "ssh-keygen", "unshare") if found(tool) is None]
    return f"there is no {', '.join(missing)}" if missing else ""


def found(tool: str) -> str | None:
    """The path of a program; also one that only root's PATH has."""
    return shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


@dataclass(frozen=True)
class Server:
    """A running sshd, and how to reach it."""

    folder: Path
    home: Path
    port: int
    process: "subprocess.Popen[bytes]"

    def target(self, alias: str = "mini-1") -> Target:
        """The host as a user has it: an alias in an ssh configuration."""
        return Target(alias, options=("-F", str(self.config)))

    @property
    def config(self) -> Path:
        """The ssh configuration of the user."""
        return self.folder / "ssh_config"

    def sessions(self) -> list[psutil.Process]:
        """The processes of open connections."""
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def ssh_server(
    folder: Path, *, shell: str = "/bin/sh", settings: str = "", aliases: str = "mini-1", port: int = 0
) -> Iterator[Server]:
    """An sshd that ends with the block, and its open connections with it. `settings`: further lines of sshd_config."""
    home = folder / "a home"  # with a space
    home.mkdir(parents=True)
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    (folder / "authorized_keys").write_text((folder / "user_key.pub").read_text())
    (folder / "passwd").write_text(f"root:x:0:0:root:{home}:{shell}\nsshd:x:101:65534::/run/sshd:/usr/sbin/nologin\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = port or probe.getsockname()[1]
    public = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {public}")
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\n"
        f"StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\nMaxStartups 100\n{settings}\n"
    )
    (folder / "ssh_config").write_text(
        f"Host {aliases}\n  HostName 127.0.0.1\n  Port {port}\n  User root\n  IdentityFile {folder}/user_key\n"
        f"  IdentitiesOnly yes\n  IdentityAgent none\n  UserKnownHostsFile {folder}/known_hosts\n"
        "  GlobalKnownHostsFile /dev/null\n"
    )
    start = START.format(passwd=folder / "passwd", sshd=found("sshd"), config=folder / "sshd_config")
    with (folder / "sshd.log").open("wb") as log:
        process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", start], stderr=log, start_new_session=True
        )
    try:
        _wait_for(port, process, folder / "sshd.log")
        yield Server(folder, home, port, process)
    finally:
        for one in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
            with suppress(psutil.NoSuchProcess):  # it may end by itself meanwhile
                if one.name() == "sshd":
                    one.kill()
        process.kill()
        process.wait()


def _wait_for(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Returns when the port answers."""
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            continue
    raise AssertionError(f"sshd ended: {log.read_text()}")
