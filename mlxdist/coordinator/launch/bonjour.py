"""The Macs with Remote Login in this network, as Bonjour names them: by dns-sd on macOS, by avahi-browse on Linux.

Both commands may never end, so each has a time limit. Output that is not understood names no host.
"""

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

from mlxdist.protocol.errors import UserError

SERVICE = "_ssh._tcp"
BROWSE_SECONDS = 4.0
RESOLVE_SECONDS = 2.0
MOST_HOSTS = 64


def nearby_hosts() -> list[str]:
    """Returns the names of hosts that offer ssh, as ssh takes them. Raises UserError where nothing can look."""
    if dns_sd := shutil.which("dns-sd"):
        found = instances(_printed([dns_sd, "-B", SERVICE], BROWSE_SECONDS))[:MOST_HOSTS]
        commands = [[dns_sd, "-L", name, SERVICE, domain] for name, domain in found]
        with ThreadPoolExecutor(MOST_HOSTS) as pool:
            answers = pool.map(lambda command: _printed(command, RESOLVE_SECONDS), commands)
        return sorted({host for answer in answers if (host := reached_at(answer))})
    if avahi := shutil.which("avahi-browse"):
        return avahi_hosts(_printed([avahi, "-rpt", SERVICE], BROWSE_SECONDS))[:MOST_HOSTS]
    raise UserError(
        "nothing here can look for hosts (on Linux: apt install avahi-utils): name them, as mlxdist hosts init mini-1"
    )


def instances(printed: str) -> list[tuple[str, str]]:
    """Returns the instances in the output of `dns-sd -B`, with their domains; those that went away are left out."""
    row = re.compile(
        rf"^\s*[\d:.]+\s+(Add|Rmv)\s+\d+\s+-?\d+\s+(\S+)\s+{re.escape(SERVICE)}\.\s+(.+?)\s*$", re.MULTILINE
    )
    found: dict[tuple[str, str], bool] = {}
    for change, domain, name in row.findall(printed):
        found[name, domain] = change == "Add"
    return [instance for instance, there in found.items() if there]


def reached_at(printed: str) -> str:
    """Returns the host in the output of `dns-sd -L`; "" for none."""
    match = re.search(r"can be reached at (\S+?)\.?:\d+ ", printed)
    return match[1] if match else ""


def avahi_hosts(printed: str) -> list[str]:
    """Returns the hosts in the output of `avahi-browse -rp`."""
    rows = [line.split(";") for line in printed.splitlines() if line.startswith("=;")]
    return sorted({row[6] for row in rows if len(row) > 8 and row[6]})


def _printed(command: list[str], seconds: float) -> str:
    """Returns what a command has printed until it ended, or until it was ended after some seconds."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        out, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
    return out.decode(errors="replace")
