"""`mlxdist hosts init`: looks at hosts over ssh and writes a first hosts.toml, with a key pair for each node."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from mlxdist.coordinator.config.hosts import HOST, is_ip
from mlxdist.coordinator.launch.findings import Finding, ssh_finding
from mlxdist.coordinator.launch.looking import LOOK_SECONDS, Seen, hardware_script, read_look
from mlxdist.coordinator.launch.ssh import Target, everywhere, run
from mlxdist.coordinator.launch.workdir import DEFAULT
from mlxdist.keys.store import KeyStore
from mlxdist.protocol.budget import format_bytes
from mlxdist.protocol.errors import UserError
from mlxdist.protocol.untrusted import NODE_NAME, quoted

HEAD = """\
# The Macs of this cluster, as `mlxdist hosts init` found them. hosts.example.toml of mlxdist shows every key.
#
#     mlxdist sync --hosts {file} run.toml      # puts Python, mlxdist and the model on them
#     mlxdist doctor --hosts {file} run.toml    # says what is wrong with them
#     mlxdist launch --hosts {file} run.toml    # trains

# run = "run.toml"          # then the commands need no run.toml: what to train, relative to this file
"""


@dataclass(frozen=True)
class Found:
    """A host with the name of its node, and what was seen of it or what is wrong with it."""

    name: str
    target: Target
    seen: Seen
    fault: Finding | None


def write_hosts(path: Path, hosts: Sequence[str], options: Sequence[str], store: KeyStore) -> list[Found]:
    """Looks at `hosts` (HOST or USER@HOST) and writes `path`, which must not exist. Returns what was found.

    Raises UserError for a file that exists, or a host that cannot be one.
    """
    if path.exists() or path.is_symlink():
        raise UserError(f"{path} is there already, and is not overwritten: give another name with --output, or move it")
    if len(set(hosts)) < len(hosts):
        raise UserError("a host is named twice: several nodes on one host are written into the file by hand")
    targets = [target_named(host, options) for host in hosts]
    names = node_names([target.host for target in targets])
    found = everywhere(lambda pair: look(*pair), list(zip(names, targets, strict=True)))
    for one in found:
        store.node_pair(one.name, now=datetime.now(UTC))
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(hosts_text(found, path.name, options))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    return found


def target_named(text: str, options: Sequence[str]) -> Target:
    """Returns the host that a person has typed. Raises UserError for what ssh cannot take."""
    user, at, host = text.rpartition("@")
    if (at and not user) or user.startswith("-") or not (HOST.fullmatch(host) or is_ip(host)):
        raise UserError(f"{quoted(text)!r} is no host as ssh takes it: give mini-1, ada@mini-1.local or an address")
    return Target(host, user, tuple(options))


def node_names(hosts: Sequence[str]) -> list[str]:
    """Returns a name for the node of each host: the host without .local, and with a number where that is taken."""
    names: list[str] = []
    for host in hosts:
        bare = re.sub(r"[^A-Za-z0-9._-]", "-", host.removesuffix(".local"))[:56].lstrip("._-") or "node"
        choices = [bare, *(f"{bare}-{number}" for number in range(2, len(hosts) + 2))]
        taken = {name.casefold() for name in names}
        names.append(next(each for each in choices if each.casefold() not in taken and NODE_NAME.fullmatch(each)))
    return names


def look(name: str, target: Target) -> Found:
    """Looks at the hardware of one host."""
    answer = run(target, hardware_script(), timeout=LOOK_SECONDS)
    return Found(name, target, read_look(answer), ssh_finding(target, answer))


def hosts_text(found: Sequence[Found], file: str, options: Sequence[str]) -> str:
    """Returns the text of a hosts.toml."""
    lines = [HEAD.format(file=file)]
    if options:
        lines += ["[defaults]", f"ssh_options = [{', '.join(map(toml_string, options))}]", ""]
    for one in found:
        lines += ["[[nodes]]", f"name = {toml_string(one.name)}", f"host = {toml_string(one.target.host)}"]
        if one.fault is not None:
            lines += [f"# not looked at: {one.fault}"]
        if user := one.seen.user or one.target.user:
            lines += [f"user = {toml_string(user)}"]
        if one.seen.home.startswith("/"):
            lines += [f"workdir = {toml_string(DEFAULT.replace('~', one.seen.home, 1))}"]
        if shown := describe(one.seen):
            lines += [f"# {shown}"]
        lines += [""]
    return "\n".join(lines)


def describe(seen: Seen) -> str:
    """Returns chip, memory and system of a host in words, as far as they are known."""
    system = {"Darwin": "macOS"}.get(seen.system, seen.system)
    parts = [
        seen.chip,
        format_bytes(seen.memory_bytes) if seen.memory_bytes else "",
        f"{system} {seen.release}".strip(),
    ]
    return ", ".join(quoted(part, 60) for part in parts if part)


def toml_string(text: str) -> str:
    """Returns a text as a basic string of TOML."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
