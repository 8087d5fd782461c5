"""The hosts of scripts/cluster_bed.py: the files and processes of their ssh servers, and those of the client."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

USER, UID = "mac", 64123
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
DIAL = """\
import socket, sys
there = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3)
there.settimeout(None)
socket.send_fds(socket.socket(fileno=1), [b"."], [there.fileno()])
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


def start_server(bed: Path, mac: Mac, namespace: str) -> "subprocess.Popen[bytes]":
    """Starts the sshd of a Mac in its namespace. `bed`: the folder of the bed."""
    folder = bed / mac.name
    home = folder / mac.home
    home.mkdir(parents=True)
    shell = where(mac.shell) or ""
    make_key(folder / "host_key")
    (folder / "authorized_keys").write_text((bed / "id.pub").read_text())
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
    steps += [f"mount --bind /dev/null {path}" for tool in mac.hidden if (path := where(tool))]
    script = " && ".join([*steps, f"exec {where('sshd')} -D -e -f {folder / 'sshd_config'}"])
    with (folder / "sshd.log").open("ab") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={"PATH": os.environ["PATH"]},
            start_new_session=True,
        )


def write_client(bed: Path, macs: Mapping[str, str], inside: Sequence[str]) -> None:
    """Writes the coordinator's ssh configuration, its known hosts, and an `ssh` that reads them.

    `macs`: the addresses by name; `inside`: words that run a command in the coordinator's namespace.
    """
    known, blocks = [], []
    for name, address in macs.items():
        known.append(f"{name},{address} {(bed / name / 'host_key.pub').read_text()}")
        blocks.append(f"Host {name}\n  HostName {address}\n  User {USER}\n")
    (bed / "known_hosts").write_text("".join(known))
    # A command outside the coordinator's namespace reaches the Macs too: the socket is opened inside, and handed out.
    dial = f"{' '.join(inside)} {sys.executable} {bed / 'dial.py'} %h %p"
    both = f"  IdentityFile {bed / 'id'}\n  UserKnownHostsFile {bed / 'known_hosts'}\n  HashKnownHosts no\n"
    both += f"  ProxyUseFdpass yes\n  ProxyCommand {dial}\n"
    (bed / "ssh_config").write_text("".join([*blocks, "Host *\n", both]))
    (bed / "dial.py").write_text(DIAL)
    script = bed / "bin" / "ssh"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {where("ssh")} -F {bed / "ssh_config"} "$@"\n')
    script.chmod(0o755)


def make_key(path: Path) -> None:
    """Makes a key pair of ssh."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "bed", "-f", str(path)], check=True)


def where(tool: str) -> str | None:
    """Returns the path of a program, also of one that only root has in PATH."""
    return shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
