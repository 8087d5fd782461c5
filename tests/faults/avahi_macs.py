"""Avahi on Macs in network namespaces: each has a daemon and a bus of its own, and answers by its own name."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.faults.namespaces import Office

TOOLS = ("avahi-daemon", "avahi-browse", "avahi-publish", "dbus-daemon", "unshare")
BUS = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig><type>system</type><listen>unix:path={bus}</listen><auth>EXTERNAL</auth><policy context="default">
<allow user="*"/><allow own="*"/><allow send_destination="*" eavesdrop="false"/><allow receive_sender="*"/>
</policy></busconfig>
"""
AVAHI = "[server]\nhost-name={name}\nallow-interfaces=eth0\nuse-ipv4=yes\nuse-ipv6=yes\n"
# Its file of the process id is at a fixed place, so each daemon gets a folder of its own there.
START = 'mount -t tmpfs none /run && mkdir /run/avahi-daemon && exec avahi-daemon --file "$0" {options}'
OPTIONS = "--no-drop-root --no-chroot --no-rlimits --no-proc-title"


def why_not() -> str:
    """The reason for which this machine cannot run them; empty when it can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not installed: apt install avahi-daemon avahi-utils dbus" if missing else ""


@contextmanager
def avahi(office: Office, where: str, folder: Path) -> Iterator[Mapping[str, str]]:
    """Avahi on one Mac, which is called WHERE.local, for a block. Gives what the commands there need to reach it."""
    folder.mkdir()
    bus, here = folder / "bus", ["ip", "netns", "exec", office.node(where)]
    (folder / "bus.conf").write_text(BUS.format(bus=bus))
    (folder / "avahi.conf").write_text(AVAHI.format(name=where))
    address = {"DBUS_SYSTEM_BUS_ADDRESS": f"unix:path={bus}"}
    buses = [f"--config-file={folder / 'bus.conf'}", "--nofork", "--nopidfile", "--print-address"]
    with _running([*here, "dbus-daemon", *buses], "unix:path", folder / "bus.log", {}):
        start = ["unshare", "--mount", "sh", "-c", START.format(options=OPTIONS), str(folder / "avahi.conf")]
        with _running([*here, *start], "Server startup complete", folder / "avahi.log", address):
            yield address


@contextmanager
def _running(command: list[str], ready: str, log: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """A command for a block, which begins when it has printed that it is ready. Raises OSError where it does not."""
    with subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            lines = list[str]()
            while not lines or ready not in lines[-1]:
                lines.append(process.stdout.readline())
                if not lines[-1]:
                    raise OSError(f"{command} has ended:\n{''.join(lines)}")
            yield
        finally:
            process.terminate()
            log.write_text("".join(lines) + process.stdout.read())
