"""The hosts of a run before it starts: which can take part, now or later, and where the coordinator listens."""

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from mlxdist.coordinator.config.hosts import Hosts, NodeSpec, is_local, listening_address, own_address, own_addresses
from mlxdist.coordinator.launch.findings import Finding
from mlxdist.coordinator.launch.looking import Seen, look_at
from mlxdist.coordinator.launch.ssh import everywhere
from mlxdist.protocol.errors import NodeError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Roster:
    """The nodes of hosts.toml, by what was seen of their hosts."""

    ready: tuple[NodeSpec, ...]
    later: tuple[NodeSpec, ...] = ()  # their hosts did not answer, and are tried again
    blocked: Mapping[str, Finding] = field(default_factory=dict)  # by name: cannot take part without a person, or later
    seen: Mapping[str, Seen] = field(default_factory=dict)  # by name; empty where all nodes are on this machine

    @property
    def sentences(self) -> list[str]:
        """Sentences on the hosts for a person, each with the name of its node."""
        blocked = [f"{name} does not take part: {fault}" for name, fault in self.blocked.items()]
        return blocked + [f"{name}: {note}" for name, seen in self.seen.items() for note in seen.notes]


def look_at_hosts(hosts: Hosts, model: str) -> Roster:
    """Looks at all hosts at the same time. Raises NodeError where fewer than `min_nodes` can take part."""
    if all(is_local(node.host) for node in hosts.nodes):
        return Roster(hosts.nodes)
    looks = everywhere(lambda node: look_at(node, model), hosts.nodes)
    return roster_of(hosts, dict(zip((node.name for node in hosts.nodes), looks, strict=True)), own_addresses())


def roster_of(hosts: Hosts, seen: Mapping[str, Seen], own: Sequence[str]) -> Roster:
    """Returns the roster by what was seen. `own`: the addresses of this machine.

    Raises NodeError where fewer than `min_nodes` can take part.
    """
    seen = {node.name: _with_way(node, hosts.coordinator.bind, seen[node.name], own) for node in hosts.nodes}
    blocked = {name: each.blocks for name, each in seen.items() if each.blocks is not None}
    roster = Roster(
        tuple(node for node in hosts.nodes if node.name not in blocked),
        tuple(node for node in hosts.nodes if node.name in blocked and blocked[node.name].transient),
        blocked,
        seen,
    )
    if len(roster.ready) < max(hosts.coordinator.min_nodes, 1):
        needed = max(hosts.coordinator.min_nodes, 1)
        verb = "is" if needed == 1 else "are"
        raise NodeError(
            f"{len(roster.ready)} of {len(hosts.nodes)} hosts can take part, and {needed} {verb} needed:"
            f"{_faults_text(blocked)}"
        )
    return roster


def _faults_text(blocked: Mapping[str, Finding]) -> str:
    """Returns the faults on a line each; a cure that several hosts share stands once, below them."""
    hosts = Counter(fault.cure for fault in blocked.values())
    shared = "".join(f"\n{cure}." for cure, count in hosts.items() if count > 1)
    return (
        "".join(f"\n  {name}: {fault.what if hosts[fault.cure] > 1 else fault}" for name, fault in blocked.items())
        + shared
    )


def _with_way(node: NodeSpec, bind: str, seen: Seen, own: Sequence[str]) -> Seen:
    """Adds a finding for a node that would dial an address which is not ours: it is reached over another host."""
    direct = node.transport == "tcp" and bind in ("auto", "*") and bool(seen.address)
    if seen.blocks is not None or not direct or own_address(seen.address, own):
        return seen
    fault = Finding(
        "no way back",
        f"it sees this machine as {seen.address}, which is another one's address: a jump host, or a router",
        'Set transport = "ssh" for it in hosts.toml, or coordinator.bind to an address that it can reach',
    )
    return replace(seen, blocks=fault)


def listening(hosts: Hosts, roster: Roster, own: Sequence[str]) -> list[str]:
    """Returns the addresses to listen on: for "auto" those by which the hosts see this machine, and no other one."""
    bind = hosts.coordinator.bind
    if bind != "auto":
        return [listening_address(bind)]
    direct = [node for node in (*roster.ready, *roster.later) if node.transport == "tcp" and not is_local(node.host)]
    seen = [own_address(roster.seen[node.name].address or way_to(node.host), own) for node in direct]
    found = [address for address in seen if address]
    loopback = len(direct) < len(roster.ready) or not found
    return list(dict.fromkeys([*([LOOPBACK] if loopback else []), *found]))


def way_to(host: str) -> str:
    """Returns our address on the way to a host that does not answer now; "" where its name is not known."""
    with suppress(OSError, UnicodeError):
        for family, kind, _, _, place in socket.getaddrinfo(host, 22, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(place)  # sends nothing: the system only chooses the way
                return str(probe.getsockname()[0])
    return ""
