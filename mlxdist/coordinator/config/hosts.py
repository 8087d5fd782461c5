"""hosts.toml: the Macs of a cluster, and where its coordinator runs."""

import ipaddress
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import psutil
from msgspec import Meta

from mlxdist.coordinator.config.field_types import Text, checked, shown
from mlxdist.coordinator.config.paths import absolute
from mlxdist.coordinator.config.toml_file import TomlFile, raise_faults, read_toml
from mlxdist.coordinator.config.unknown_keys import nearest
from mlxdist.protocol.errors import ConfigError
from mlxdist.protocol.untrusted import NODE_NAME

HOSTS_FILE = "hosts.toml"
LOCAL = ("localhost", "127.0.0.1", "::1")
HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")

Name = Annotated[
    str,
    Meta(
        pattern=rf"^{NODE_NAME.pattern}\Z",
        description="at most 64 letters, digits, points, dashes or underscores, a letter or digit first",
    ),
]
Interpreter = Annotated[str, Meta(pattern="^(/|$)", description="an absolute path on that host")]


@dataclass(frozen=True, kw_only=True)
class CoordinatorHost:
    """[coordinator]: where the coordinator runs and listens."""

    host: Text = "localhost"  # the Mac that it runs on; another one: launch is a viewer
    bind: Text = "auto"  # auto = loopback, and the addresses by which the hosts see us; * = every address
    port: Annotated[int, Meta(ge=1024, le=65534)] | Literal[0] = 0  # control; data is the next one; 0 = two free ones
    min_nodes: Annotated[int, Meta(ge=1)] = 1  # the run waits while fewer nodes are ready
    mixed: Literal["spare", "allow"] = "spare"  # what becomes of a node with other last bits than the run's nodes


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """One of [[nodes]], with [defaults] filled in."""

    name: Name  # stable and unique; default: the host, with -2, -3 … for further nodes on it
    host: Text  # what ssh takes, or localhost
    user: str = ""  # for ssh; "" = as ssh's own configuration says
    python: Interpreter = ""  # absolute path of the interpreter there; "" = that of sync, here the coordinator's
    workdir: str = ""  # folder on that host, all of ours lies in it; "" = ~/mlxdist
    model: str = ""  # folder of the model on that host; "" = the one of sync, else as the run says
    memory_limit_gb: Annotated[float, Meta(ge=0)] = 0.0  # GB (10^9 bytes) for MLX; 0 = what the machine allows
    transport: Literal["tcp", "ssh"] = "tcp"  # ssh: both connections go through ssh -R
    ssh_options: tuple[str, ...] = ()  # words for ssh before its own: ["-F", "/path/config"]
    caffeinate: bool = True  # keeps the Mac awake while it works (macOS only)


@dataclass(frozen=True)
class Hosts:
    """A cluster: its run (or None), its coordinator, its nodes in the order of the file."""

    run: Path | None
    coordinator: CoordinatorHost
    nodes: tuple[NodeSpec, ...]


def local_hosts(count: int) -> Hosts:
    """Returns `count` nodes on this machine, the cluster of a launch without hosts.toml."""
    names = ["localhost", *(f"localhost-{number}" for number in range(2, count + 1))]
    nodes = tuple(NodeSpec(name=name, host="localhost") for name in names[:count])
    return Hosts(None, CoordinatorHost(), nodes)


def is_local(host: str) -> bool:
    """Returns True when `host` is a loopback name, or this machine's own name or address. No name is looked up."""
    here = socket.gethostname().lower().removesuffix(".local")
    if host.lower() in LOCAL or host.lower().removesuffix(".local") == here:
        return True
    return is_ip(host) and bool(own_address(host, own_addresses()))


def own_addresses() -> list[str]:
    """Returns the addresses of this machine, link-local ones with their zone."""
    families = (socket.AF_INET, socket.AF_INET6)
    return [each.address for every in psutil.net_if_addrs().values() for each in every if each.family in families]


def own_address(address: str, own: Sequence[str]) -> str:
    """Returns the one of our addresses that is `address`, with our zone instead of another host's; "" for none."""
    bare = address.partition("%")[0]
    return next((each for each in own if each.partition("%")[0] == bare and bare), "")


def is_loopback(bind: str) -> bool:
    """Returns True when listening on `bind` stays on this machine, as "auto" does with local nodes."""
    return bind in ("auto", *LOCAL) or (bind != "*" and ipaddress.ip_address(bind).is_loopback)


def listening_address(bind: str) -> str:
    """Returns the address that `bind` stands for; "*" is every address of both families."""
    return "127.0.0.1" if bind in ("auto", "localhost") else bind


def dialed_address(bind: str) -> str:
    """Returns the address at which nodes on this machine reach a coordinator that listens on `bind`."""
    return "127.0.0.1" if bind in ("*", "0.0.0.0") else "::1" if bind == "::" else listening_address(bind)


def load_hosts(path: Path) -> Hosts:
    """Returns the cluster in the file `path` (a folder: its hosts.toml). Raises ConfigError with up to ten faults."""
    if path.is_dir():
        path = path / HOSTS_FILE
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file; hosts.example.toml shows every key")
    file = read_toml(path)
    top = ["run", "coordinator", "defaults", "nodes"]
    faults = [f"{file.place(key)} is not a key; {_nearest(key, top)}" for key in file.values if key not in top]
    run = _run(file, faults)
    coordinator = CoordinatorHost(**_table(file, "coordinator", CoordinatorHost, faults))
    nodes = _nodes(file, faults)
    if nodes and coordinator.min_nodes > len(nodes):
        text = f"is {coordinator.min_nodes}, and there are {len(nodes)} [[nodes]]: the run would wait forever"
        faults.append(f"{file.place('coordinator.min_nodes')} {text}")
    raise_faults(faults)
    return Hosts(run, coordinator, nodes)


def _run(file: TomlFile, faults: list[str]) -> Path | None:
    text = file.values.get("run")
    if text is None:
        return None
    if not isinstance(text, str) or not text or "\0" in text:
        faults.append(f"{file.place('run')} = {shown(text)}: must be the path of a run.toml in quotes")
        return None
    path = absolute(text, file.path.parent.absolute())
    if not os.path.exists(path):  # unlike Path.exists it takes a path that is too long
        faults.append(f'{file.place("run")} = "{text}" leads to {path}, where there is no file')
    return path


def _nodes(file: TomlFile, faults: list[str]) -> tuple[NodeSpec, ...]:
    """Returns the nodes with [defaults] and names filled in, and adds what is wrong with them to `faults`."""
    defaults = _table(file, "defaults", NodeSpec, faults, without=("name", "host"))
    listed = file.values.get("nodes")
    if listed == []:  # on purpose: all nodes join by hand
        return ()
    if not listed:
        faults.append(f"{file.place('nodes')} are missing: write [[nodes]] with a host")
        return ()
    if not isinstance(listed, list) or not all(isinstance(node, dict) for node in listed):
        faults.append(f'{file.place("nodes")} must be at least one [[nodes]] with host = "…"')
        return ()
    given = [_table(file, f"nodes.{index}", NodeSpec, faults) for index in range(len(listed))]
    for index, node in enumerate(listed):
        if "host" not in node:
            faults.append(f'{file.place(f"nodes.{index}")} has no host: write host = "mini-1" or "localhost"')
    return tuple(NodeSpec(**{"host": "localhost", **defaults, **node}) for node in _named(file, given, faults))


def _named(file: TomlFile, nodes: Sequence[dict[str, Any]], faults: list[str]) -> list[dict[str, Any]]:
    """Returns the nodes, each with its own name. Names that differ in case alone are equal, as macOS's files are."""
    taken: dict[str, int] = {}
    for index, node in enumerate(nodes):
        if "name" in node:
            first = taken.setdefault(node["name"].casefold(), index)
            if first != index:
                line = file.lines.get(f"nodes.{first}.name")
                other = f" in line {line}" if line else ""
                text = f'= "{node["name"]}": another node{other} has this name; each needs its own'
                faults.append(f"{file.place(f'nodes.{index}.name')} {text}")
    named = []
    for node in nodes:
        host = node.get("host", "node").replace(":", "-").replace("%", "-")
        choices = chain([host], (f"{host}-{number}" for number in count(2)))
        name = node.get("name") or next(choice for choice in choices if choice.casefold() not in taken)
        taken.setdefault(name.casefold(), -1)
        named.append({**node, "name": name})
    return named


def _table(
    file: TomlFile, table: str, cls: type[CoordinatorHost | NodeSpec], faults: list[str], without: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the correct keys of one table ("nodes.0" for the first of an array), and adds to `faults`."""
    given: Any = file.values
    for part in table.split("."):
        given = given[int(part)] if isinstance(given, list) else given.get(part, {})
    if not isinstance(given, dict):
        faults.append(f"{file.place(table)} = {shown(given)}: must be a table, [{table}]")
        return {}
    hints = get_type_hints(cls, include_extras=True)
    values = {}
    for key, value in given.items():
        place = file.place(f"{table}.{key}")
        if key in without:
            faults.append(f"{place} belongs in each of [[nodes]]; it has no default")
        elif key not in hints:
            faults.append(f"{place} is not a key; {_nearest(key, [name for name in hints if name not in without])}")
        else:
            try:
                values[key] = _address(key, checked(hints[key], value), user_key="user" in hints)
            except ValueError as error:
                faults.append(f"{place} = {shown(value)}: {error}")
    return values


def _address(key: str, value: Any, *, user_key: bool) -> Any:
    """Returns `value`. Raises ValueError for a host or an address to listen on that cannot be one."""
    if key == "host" and user_key and "@" in value:
        user, _, bare = value.partition("@")
        raise ValueError(f'the user is a key of its own: user = "{user}", host = "{bare}"')
    if key == "host" and not HOST.fullmatch(value) and not is_ip(value):
        raise ValueError("must be a name or address as ssh takes it, without user or port")
    if key == "bind" and value not in ("auto", "*", "localhost") and not is_ip(value):
        raise ValueError('must be "auto", "*" or an IP address of the coordinator')
    return value


def _nearest(key: str, known: Sequence[str]) -> str:
    near = nearest(key, known)
    return f"the nearest is {near}" if near else f"there are {', '.join(known)}"


def is_ip(text: str) -> bool:
    """Returns True for an IPv4 or IPv6 address, with or without a zone."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
