"""hosts.toml: the Macs of a cluster, and which one leads.

`load_hosts` reads the whole language; `local_only` refuses what this version cannot do yet.
"""

import ipaddress
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_type_hints

from mlxdist.coordinator.config.field_types import Filled, Limits, UnfitError, fit, meant, shown, words
from mlxdist.coordinator.config.paths import absolute
from mlxdist.coordinator.config.toml_file import Fault, TomlFile, read, refuse
from mlxdist.coordinator.config.unknown_keys import nearest
from mlxdist.protocol.errors import ConfigError

HOSTS_FILE = "hosts.toml"
LOCAL = ("localhost", "127.0.0.1", "::1")
HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # it names a log file too

Text = Annotated[str, Filled()]


@dataclass(frozen=True, kw_only=True)
class CoordinatorHost:
    """[coordinator]: where the coordinator runs and listens."""

    host: Text = "localhost"  # the Mac that it runs on
    bind: Text = "auto"  # address to listen on; auto = loopback while all nodes are local, else every address
    port: Annotated[int, Limits(low=1024, high=65534, also=(0,))] = 0  # control; data is the next one; 0 = picks both
    min_nodes: Annotated[int, Limits(low=1)] = 1  # nodes without which the run waits


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """One of [[nodes]], with [defaults] filled in."""

    name: Text  # stable and unique; default: the host, with -2, -3 … for further nodes on it
    host: Text  # what ssh takes, or localhost
    user: str = ""  # for ssh; "" = as ssh's own configuration says
    python: str = ""  # absolute path of the interpreter on that host; "" = the coordinator's own
    workdir: str = ""  # folder on that host for logs and caches; "" = the coordinator's choice
    model: str = ""  # folder of the model on that host; "" = as the run says
    memory_limit_gb: Annotated[float, Limits(low=0)] = 0.0  # GB (10^9 bytes) for MLX; 0 = what the machine allows
    transport: Literal["tcp", "ssh"] = "tcp"  # ssh: both connections go through ssh -R
    caffeinate: bool = True  # keeps the Mac awake while it works (macOS only)


@dataclass(frozen=True)
class Hosts:
    """A cluster: its run (or None), its coordinator, its nodes in the order of the file."""

    run: Path | None
    coordinator: CoordinatorHost
    nodes: tuple[NodeSpec, ...]


# Values that need a feature of a later version: (whether a value needs it, the sentence).
# Delete an entry when its feature lands; nothing else needs to change.
NOT_YET: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        "coordinator.host": (lambda host: not is_local(host), "starting the coordinator on another Mac"),
        "coordinator.bind": (lambda bind: not is_loopback(bind), "listening beyond this machine"),
        "nodes.host": (lambda host: not is_local(host), 'launching over ssh; until then host = "localhost"'),
        "nodes.user": (bool, "launching over ssh"),
        "nodes.python": (bool, "an interpreter of its own for a node"),
        "nodes.workdir": (bool, "a work folder of its own for a node"),
        "nodes.model": (bool, "a model folder of its own for a node"),
        "nodes.transport": (lambda transport: transport != "tcp", "connections through ssh"),
    }
)


def local_hosts(count: int) -> Hosts:
    """`count` nodes on this machine: what a launch without hosts.toml uses."""
    names = ["localhost", *(f"localhost-{number}" for number in range(2, count + 1))]
    nodes = tuple(NodeSpec(name=name, host="localhost") for name in names[:count])
    return Hosts(None, CoordinatorHost(), nodes)


def is_local(host: str) -> bool:
    """Whether `host` is this machine, by its own name or a loopback name; nothing is looked up."""
    here = socket.gethostname().lower().removesuffix(".local")
    return host.lower() in LOCAL or host.lower().removesuffix(".local") == here


def is_loopback(bind: str) -> bool:
    """Whether listening on `bind` stays on this machine, "auto" with local nodes included."""
    return bind in ("auto", *LOCAL) or (bind != "*" and ipaddress.ip_address(bind).is_loopback)


def local_only(hosts: Hosts) -> None:
    """Raise NotYetError, with every reason, when `hosts` asks for more than nodes on this machine."""
    faults = _to_come(hosts.coordinator, "coordinator", "[coordinator]")
    for node in hosts.nodes:
        faults += _to_come(node, "nodes", f'node "{node.name}"')
    refuse(faults)


def _to_come(part: CoordinatorHost | NodeSpec, table: str, title: str) -> list[Fault]:
    values = {key.name: getattr(part, key.name) for key in fields(part)}
    entries = [(key, value, NOT_YET[f"{table}.{key}"]) for key, value in values.items() if f"{table}.{key}" in NOT_YET]
    return [
        Fault(f"{title}: {key} = {shown(value)}: not yet: {sentence}", not_yet=True)
        for key, value, (needs, sentence) in entries
        if needs(value)
    ]


def load_hosts(path: Path) -> Hosts:
    """The cluster in the file `path` (a folder: its hosts.toml). Raises ConfigError with up to ten faults."""
    if path.is_dir():
        path = path / HOSTS_FILE
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file; hosts.example.toml shows every key")
    file = read(path)
    faults: list[Fault] = []
    top = ["run", "coordinator", "defaults", "nodes"]
    for key in file.values:
        if key not in top:
            faults.append(Fault(f"{file.place(key)} is not a key; {_nearest(key, top)}"))
    run = _run(file, faults)
    coordinator = _table(file, "coordinator", CoordinatorHost, faults)
    faults += _faulty_words(file, "coordinator", coordinator)
    bind = coordinator.get("bind", "auto")
    if bind not in ("auto", "*", "localhost") and not _is_address(bind):
        text = f'= {shown(bind)}: must be "auto", "*" or an IP address of the coordinator'
        faults.append(Fault(f"{file.place('coordinator.bind')} {text}"))
    nodes = _nodes(file, faults)
    if nodes and coordinator.get("min_nodes", 1) > len(nodes):
        text = f"is {coordinator['min_nodes']}, and there are {len(nodes)} [[nodes]]: the run would wait for ever"
        faults.append(Fault(f"{file.place('coordinator.min_nodes')} {text}"))
    refuse(faults)
    return Hosts(run, CoordinatorHost(**coordinator), nodes)


def _run(file: TomlFile, faults: list[Fault]) -> Path | None:
    text = file.values.get("run")
    if text is None:
        return None
    if not isinstance(text, str) or not text or "\0" in text:
        faults.append(Fault(f"{file.place('run')} = {shown(text)}: must be the path of a run.toml in quotes"))
        return None
    path = absolute(text, file.path.parent.absolute())
    if not path.exists():
        faults.append(Fault(f'{file.place("run")} = "{text}" leads to {path}, and there is no file'))
    return path


def _nodes(file: TomlFile, faults: list[Fault]) -> tuple[NodeSpec, ...]:
    """The nodes with [defaults] and names filled in; faulty ones are left out of the answer, not of the faults."""
    defaults = _table(file, "defaults", NodeSpec, faults, without=("name", "host"))
    faults += _faulty_words(file, "defaults", defaults)
    listed = file.values.get("nodes")
    if listed == []:  # said, not forgotten: all nodes join by hand
        return ()
    if not isinstance(listed, list) or not listed or not all(isinstance(node, dict) for node in listed):
        text = (
            'must be at least one [[nodes]] with host = "…"' if listed else "are missing: write [[nodes]] with a host"
        )
        faults.append(Fault(f"{file.place('nodes')} {text}"))
        return ()
    given = [_table(file, f"nodes.{index}", NodeSpec, faults) for index in range(len(listed))]
    for index, node in enumerate(given):
        if "host" not in listed[index]:
            faults.append(Fault(f'{file.place(f"nodes.{index}")} has no host: write host = "mini-1" or "localhost"'))
        faults += _faulty_words(file, f"nodes.{index}", node)
    return tuple(NodeSpec(**{**defaults, **node}) for node in _named(file, given, faults) if "host" in node)


def _faulty_words(file: TomlFile, table: str, node: Mapping[str, Any]) -> list[Fault]:
    """What is wrong with the texts of a table, beyond their types."""
    said = {}
    host, name, python = node.get("host"), node.get("name"), node.get("python")
    if host is not None and "@" in host and table != "coordinator":
        user, _, bare = host.partition("@")
        said["host"] = f'= {shown(host)}: the user is a key of its own: user = "{user}", host = "{bare}"'
    elif host is not None and not HOST.fullmatch(host) and not _is_address(host):
        said["host"] = f"= {shown(host)}: must be a name or address as ssh takes it, without user or port"
    if name is not None and not NAME.fullmatch(name):
        said["name"] = f"= {shown(name)}: must be letters, digits, points, dashes or underscores, at most 64"
    if python and not Path(python).is_absolute():
        said["python"] = f"= {shown(python)}: must be an absolute path on that host"
    return [Fault(f"{file.place(f'{table}.{key}')} {text}") for key, text in said.items()]


def _named(file: TomlFile, nodes: Sequence[dict[str, Any]], faults: list[Fault]) -> list[dict[str, Any]]:
    """The nodes, each with a name of its own; names count as equal in any case, as macOS's files do."""
    taken: dict[str, int] = {}
    for index, node in enumerate(nodes):
        if "name" in node:
            first = taken.setdefault(node["name"].casefold(), index)
            if first != index:
                line = file.lines.get(f"nodes.{first}.name")
                other = f" in line {line}" if line else ""
                text = f'= "{node["name"]}": another node{other} has this name; each needs its own'
                faults.append(Fault(f"{file.place(f'nodes.{index}.name')} {text}"))
    named = []
    for node in nodes:
        name, number = node.get("name"), 1
        while name is None:
            choice = node.get("host", "node").replace(":", "-").replace("%", "-") + (f"-{number}" if number > 1 else "")
            if choice.casefold() not in taken:
                taken[choice.casefold()] = -1
                name = choice
            number += 1
        named.append({**node, "name": name})
    return named


def _table(
    file: TomlFile, table: str, cls: type[CoordinatorHost | NodeSpec], faults: list[Fault], without: Sequence[str] = ()
) -> dict[str, Any]:
    """The checked keys of one table ("nodes.0" for the first of an array)."""
    values: Any = file.values
    for part in table.split("."):
        values = values[int(part)] if isinstance(values, list) else values.get(part, {})
    if not isinstance(values, dict):
        faults.append(Fault(f"{file.place(table)} = {shown(values)}: must be a table, [{table}]"))
        return {}
    hints = get_type_hints(cls, include_extras=True)
    known = [name for name in hints if name not in without]
    fitted = {}
    for key, value in values.items():
        place = file.place(f"{table}.{key}")
        if key in without:
            faults.append(Fault(f"{place} is a key of each of [[nodes]], it has no default"))
        elif key not in hints:
            faults.append(Fault(f"{place} is not a key; {_nearest(key, known)}"))
        else:
            try:
                fitted[key] = fit(hints[key], value)
            except UnfitError:
                faults.append(Fault(f"{place} = {shown(value)}: must be {words(hints[key])}{meant(hints[key], value)}"))
    return fitted


def _nearest(key: str, known: Sequence[str]) -> str:
    near = nearest(key, known)
    return f"the nearest is {near}" if near else f"there are {', '.join(known)}"


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
