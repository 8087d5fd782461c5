"""Bonjour: services in this network, found and announced by dns-sd on macOS, by avahi on Linux, or by zeroconf.

The commands may never end, so each has a time limit. Output that is not understood names nothing. Everyone on the
network can announce anything: a name is a hint where to look, and no proof of who is there.
"""

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from mlxdist.protocol.errors import UserError

BROWSE_SECONDS = 4.0
RESOLVE_SECONDS = 2.0
ENDS_SECONDS = 0.5  # within which a command that announces ends where its daemon does not run
MOST_FOUND = 64
# Runs a command until it ends, or standard input does. A command in the background reads nothing, hence the copy, 3.
ENDS_WITH_INPUT = 'exec 3<&0; "$@" 3<&- & command=$!; (read -r _ <&3; kill "$command") & wait "$command"; kill $!'


@dataclass(frozen=True)
class Service:
    """A service as it was announced: the host or its address, the port, and its text by key."""

    host: str
    port: int = 0
    texts: Mapping[str, str] = field(default_factory=dict)


def find(kind: str, ask: str) -> list[Service]:
    """Returns the services of a kind, as "_ssh._tcp", each once.

    Raises UserError, which ends in `ask`, where nothing here can look.
    """
    found: list[Service] | None = None
    if dns_sd := shutil.which("dns-sd"):
        named = instances(kind, _printed([dns_sd, "-B", kind], BROWSE_SECONDS)[0])[:MOST_FOUND]
        commands = [[dns_sd, "-L", name, kind, domain] for name, domain in named]
        with ThreadPoolExecutor(MOST_FOUND) as pool:
            answers = pool.map(lambda command: _printed(command, RESOLVE_SECONDS)[0], commands)
        found = [service for answer in answers if (service := resolved(answer)) is not None]
    elif avahi := shutil.which("avahi-browse"):
        printed, works = _printed([avahi, "-rpt", kind], BROWSE_SECONDS)
        found = avahi_services(printed) if works else None
    if found is None:
        found = _by_zeroconf(kind)
    if found is None:
        raise UserError(
            "nothing here can look for Macs in the network (on Linux: apt install avahi-daemon avahi-utils, or pip "
            f"install zeroconf): {ask}"
        )
    return list({(each.host, each.port): each for each in found}.values())[:MOST_FOUND]


def instances(kind: str, printed: str) -> list[tuple[str, str]]:
    """Returns the instances in the output of `dns-sd -B`, with their domains; those that went away are left out."""
    row = re.compile(rf"^\s*[\d:.]+\s+(Add|Rmv)\s+\d+\s+-?\d+\s+(\S+)\s+{re.escape(kind)}\.\s+(.+?)\s*$", re.MULTILINE)
    found: dict[tuple[str, str], bool] = {}
    for change, domain, name in row.findall(printed):
        found[name, domain] = change == "Add"
    return [instance for instance, there in found.items() if there]


def resolved(printed: str) -> Service | None:
    """Returns the service in the output of `dns-sd -L`; None where there is none."""
    match = re.search(r"can be reached at (\S+?)\.?:(\d{1,5}) ", printed)
    return Service(match[1], int(match[2]), _texts(printed[match.end() :].split())) if match else None


def avahi_services(printed: str) -> list[Service]:
    """Returns the services in the output of `avahi-browse -rp`, by the name of the host.

    A host has a row for each of its addresses: an IPv4 address is taken before others, and a link-local one gets the
    interface on which it was seen, without which nothing reaches it.
    """
    rows = [line.split(";") for line in printed.splitlines() if line.startswith("=;")]
    found = {}
    for row in sorted((row for row in rows if len(row) > 8), key=lambda row: ":" not in row[7]):
        if row[6] and row[8].isdigit():
            texts = _texts(each.strip('"') for each in ";".join(row[9:]).split('" "'))
            address = f"{row[7]}%{row[1]}" if row[7].lower().startswith("fe80:") else row[7]
            found[row[6], int(row[8])] = Service(row[6], int(row[8]), {**texts, "address": address})
    return [found[place] for place in sorted(found)]


def _texts(words: Sequence[str] | Iterator[str]) -> dict[str, str]:
    pairs = (word.partition("=") for word in words)
    return {key: value for key, equals, value in pairs if equals}


def _by_zeroconf(kind: str) -> list[Service] | None:
    """Returns the services that the library zeroconf finds; None without it."""
    try:
        from zeroconf import ServiceBrowser, Zeroconf
    except ImportError:
        return None
    names = set[str]()

    def changed(zeroconf: object, service_type: str, name: str, state_change: object) -> None:
        names.add(name)

    try:
        with Zeroconf() as zeroconf:
            ServiceBrowser(zeroconf, f"{kind}.local.", handlers=[changed])
            time.sleep(BROWSE_SECONDS)
            infos = [zeroconf.get_service_info(f"{kind}.local.", name) for name in sorted(names)[:MOST_FOUND]]
    except OSError:  # no network
        return []
    found = []
    for info in infos:
        if info is not None and info.port and (addresses := info.parsed_addresses()):
            texts = {key: value or "" for key, value in info.decoded_properties.items()}
            found.append(
                Service((info.server or addresses[0]).rstrip("."), info.port, texts | {"address": addresses[0]})
            )
    return found


@contextmanager
def announced(kind: str, name: str, port: int, texts: Mapping[str, str], addresses: Sequence[str]) -> Iterator[bool]:
    """Announces a service while the block lasts, and this process. Gives False where nothing here can announce."""
    words = [f"{key}={value}" for key, value in texts.items()]
    name = f"{name}-{port}"  # avahi refuses a second service of a name on one machine
    if dns_sd := shutil.which("dns-sd"):
        process = _started([dns_sd, "-R", name, kind, "local", str(port), *words])
    elif avahi := shutil.which("avahi-publish"):
        process = _started([avahi, "-s", name, kind, str(port), *words])
    else:
        process = None
    if process is not None:
        with process:  # which closes its standard input, and waits
            try:
                process.wait(ENDS_SECONDS)
            except subprocess.TimeoutExpired:
                yield True
                return
    with _announced_by_zeroconf(kind, name, port, texts, addresses) as there:
        yield there


def _started(command: list[str]) -> "subprocess.Popen[bytes]":
    """Starts a command that ends when its standard input is closed, so also when this process is killed."""
    null = subprocess.DEVNULL
    shell = ["/bin/sh", "-c", ENDS_WITH_INPUT, "sh", *command]
    return subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True)


@contextmanager
def _announced_by_zeroconf(
    kind: str, name: str, port: int, texts: Mapping[str, str], addresses: Sequence[str]
) -> Iterator[bool]:
    try:
        from zeroconf import NonUniqueNameException, ServiceInfo, Zeroconf
    except ImportError:
        yield False
        return
    packed = [socket.inet_aton(address) for address in addresses if ":" not in address]
    instance = f"{name}.{kind}.local."
    host = f"{socket.gethostname().removesuffix('.local')}.local."
    info = ServiceInfo(f"{kind}.local.", instance, port=port, addresses=packed, properties=dict(texts), server=host)
    try:
        zeroconf = Zeroconf()
    except OSError:  # no network
        yield False
        return
    with zeroconf:
        with suppress(NonUniqueNameException):
            zeroconf.register_service(info, allow_name_change=True)
        yield True


def _printed(command: list[str], seconds: float) -> tuple[str, bool]:
    """Returns what a command has printed until it ended, or was ended after some seconds; False: it failed."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        out, _ = process.communicate(timeout=seconds)
        works = process.returncode == 0
    except subprocess.TimeoutExpired:
        process.kill()
        (out, _), works = process.communicate(), True
    return out.decode(errors="replace"), works
