"""Ports with an allow-list, over real sockets: who is let in, whose name counts, and what strangers cost."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import zmq

from mlxdist.coordinator.cluster.cluster import Cluster
from mlxdist.coordinator.cluster.settings import ClusterSettings
from mlxdist.coordinator.fleet.access import Access, open_access, server_pair
from mlxdist.coordinator.fleet.doorway import MOST_WAITING
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.fleet.sockets import RouterHub
from mlxdist.keys.pair import NodeKeys, Pair, new_pair
from mlxdist.keys.store import KeyStore
from mlxdist.node.link.sockets import DealerLink
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import ConfigError, UserError
from mlxdist.protocol.transport import CONTROL, DATA, Trouble
from mlxdist.protocol.wire import decode, encode
from tests.coordinator.cluster.scripted_node import SPEC, VERSIONS

HERE = "127.0.0.1"
NOW = datetime(2026, 5, 1, tzinfo=UTC)
A, B, STRANGER = new_pair(), new_pair(), new_pair()
WAIT_SECONDS = 20.0


@dataclass
class Door:
    """A coordinator whose ports are encrypted, with nodes a and b admitted."""

    access: Access
    hub: RouterHub
    cluster: Cluster
    fleet: Fleet
    links: list[DealerLink] = field(default_factory=list)

    def link(self, pair: Pair | None, channel: str = CONTROL, server: str = "", host: str = HERE) -> DealerLink:
        keys = NodeKeys(pair.secret, server or self.access.server.public) if pair is not None else None
        made = DealerLink(f"tcp://{host}:{self.hub.ports[channel]}", os.urandom(16), keys=keys)
        self.links.append(made)
        return made

    def lines(self) -> list[str]:
        """Returns the lines of the coordinator's log."""
        return [news.message for news in self.cluster.news if news.name == "coordinator"]


def until(look: Callable[[], Any]) -> Any:
    """Returns the finding of `look`, as soon as there is one."""
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        if found := look():
            return found
        threading.Event().wait(0.01)
    raise AssertionError("waited in vain")


def say(link: DealerLink, message: m.Message) -> None:
    """Sends a message as soon as there is a connection."""
    until(lambda: link.receive(0.01) or link.send(encode(message)))


def answer(link: DealerLink) -> m.Message:
    return decode(until(lambda: link.receive(0.05))[0])[0]


def register(name: str) -> m.Register:
    return m.Register(m.PROTOCOL_VERSION, name, 0, {})


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    store = KeyStore(tmp_path / "keys")
    store.admit("a", A.public, now=NOW)
    store.admit("b", B.public, now=NOW)
    return store


@pytest.fixture
def door(tmp_path: Path, store: KeyStore) -> Iterator[Door]:
    (tmp_path / "state").mkdir()
    access = open_access(tmp_path / "state", store, resume=False)
    hub = RouterHub([HERE], 0, access)
    cluster = Cluster(ClusterSettings("run", 5, SPEC, VERSIONS, hub.ports[DATA]))
    made = Door(access, hub, cluster, Fleet(cluster, hub))
    yield made
    assert cluster.failure is None
    for link in made.links:
        link.close()
    cluster.nodes.clear()  # none would say goodbye
    made.fleet.close("the test is over")


def test_an_admitted_node_is_accepted(door: Door) -> None:
    link = door.link(A)
    say(link, register("a"))
    assert isinstance(answer(link), m.Accept)
    assert link.trouble is None


@pytest.mark.parametrize("channel", [CONTROL, DATA])
def test_another_key_is_refused_and_the_node_knows(door: Door, channel: str) -> None:
    link = door.link(STRANGER, channel)
    until(lambda: link.receive(0.01) or link.trouble)
    assert link.trouble is Trouble.KEY_REFUSED
    assert not link.send(encode(register("a")))
    until(lambda: any("its key is not known here" in line for line in door.lines()))


def test_a_node_that_expects_another_coordinator_says_nothing_to_this_one(door: Door) -> None:
    link = door.link(A, server=STRANGER.public)
    until(lambda: link.receive(0.01) or link.trouble)
    assert link.trouble is Trouble.ENDED
    assert not link.send(encode(register("a")))


@pytest.mark.parametrize("channel", [CONTROL, DATA])
def test_a_connection_without_encryption_is_refused(door: Door, channel: str) -> None:
    link = door.link(None, channel)
    until(lambda: link.receive(0.01) or link.trouble)
    assert link.trouble in (Trouble.ENCRYPTION, Trouble.ENDED)  # which of the two sides noticed first
    assert not link.send(encode(register("a")))


def test_a_node_with_keys_does_not_speak_without_encryption() -> None:
    hub = RouterHub([HERE], 0)
    link = DealerLink(f"tcp://{HERE}:{hub.ports[CONTROL]}", b"a", keys=NodeKeys(A.secret, B.public))
    until(lambda: link.receive(0.01) or link.trouble)
    assert link.trouble in (Trouble.ENCRYPTION, Trouble.ENDED)  # which of the two sides noticed first
    assert not link.send(encode(register("a")))
    link.close()
    hub.close()


def test_a_node_that_is_admitted_while_it_waits_is_accepted(door: Door) -> None:
    link = door.link(STRANGER)
    until(lambda: link.receive(0.01) or link.trouble)
    door.access.store.admit("c", STRANGER.public, now=NOW)
    say(link, register("c"))
    assert isinstance(answer(link), m.Accept)
    assert link.trouble is None


def test_a_node_does_not_take_the_name_of_another_key(door: Door) -> None:
    link = door.link(A)
    say(link, register("b"))
    refusal = answer(link)
    assert isinstance(refusal, m.Reject)
    assert "its key belongs to the node a" in refusal.reason
    assert not door.cluster.nodes


def test_a_session_counts_only_under_the_key_of_its_node(door: Door) -> None:
    """Even the whole session, stolen, is of no use to another admitted node, on either channel."""
    link = door.link(A)
    say(link, register("a"))
    accept = answer(link)
    assert isinstance(accept, m.Accept)
    for channel, message in ((CONTROL, m.Leave(accept.session)), (DATA, m.Hello(accept.session, VERSIONS))):
        thief = door.link(B, channel)
        say(thief, message)
        stale = answer(thief)
        assert isinstance(stale, m.Stale)
        assert "another node's key" in stale.what
    assert not door.cluster.nodes["a"].gone
    assert door.cluster.nodes["a"].worker.data is None


def test_a_node_that_is_forgotten_is_not_heard_any_more(door: Door) -> None:
    link = door.link(A)
    say(link, register("a"))
    accept = answer(link)
    assert isinstance(accept, m.Accept)
    door.access.store.forget("a")
    until(lambda: door.access.name_of(A.public) is None or door.hub.wake())
    heard = door.cluster.nodes["a"].control.heard
    link.send(encode(m.Heartbeat(accept.session, 0)))
    other = door.link(B)
    say(other, register("b"))
    assert isinstance(answer(other), m.Accept)
    assert door.cluster.nodes["a"].control.heard == heard
    again = door.link(A)
    until(lambda: again.receive(0.01) or again.trouble)
    assert again.trouble is Trouble.KEY_REFUSED


def test_what_is_no_node_is_refused_and_said_once(door: Door) -> None:
    for sent in (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 4, b"\x16\x03\x01\x02\x00\x01\x00" * 20, b"", bytes(100)) * 5:
        with socket.create_connection((HERE, door.hub.ports[CONTROL])) as plain, suppress(OSError):
            plain.sendall(sent)
            plain.shutdown(socket.SHUT_WR)  # as a peer that has said all; it may have been closed already
            while plain.recv(4096):
                pass
    until(lambda: door.cluster.offenders.refused >= 20)
    for address in (HERE, "an address that was gone at once"):
        assert len([line for line in door.lines() if f"a connection from {address} was refused" in line]) <= 1
    assert door.lines()
    link = door.link(A)
    say(link, register("a"))
    assert isinstance(answer(link), m.Accept)


@pytest.mark.parametrize("encrypted", [True, False])
def test_half_open_connections_are_bounded_and_keep_no_node_out(
    encrypted: bool, store: KeyStore, tmp_path: Path
) -> None:
    (tmp_path / "state").mkdir()
    access = open_access(tmp_path / "state", store, resume=False) if encrypted else None
    hub = RouterHub([HERE], 0, access, handshake_seconds=600)
    cluster = Cluster(ClusterSettings("run", 5, SPEC, VERSIONS, hub.ports[DATA]))
    fleet = Fleet(cluster, hub)
    halves = []
    keys = NodeKeys(A.secret, access.server.public) if access is not None else None
    link = DealerLink(f"tcp://{HERE}:{hub.ports[CONTROL]}", b"a", keys=keys)
    say(link, register("a"))
    accept = answer(link)
    assert isinstance(accept, m.Accept)
    before = len(os.listdir("/dev/fd"))
    for _ in range(2 * MOST_WAITING):
        halves.append(socket.create_connection((HERE, hub.ports[CONTROL])))
    until(lambda: cluster.offenders.refused >= MOST_WAITING)
    until(lambda: len(os.listdir("/dev/fd")) - before - len(halves) <= MOST_WAITING)
    assert link.send(encode(m.Heartbeat(accept.session, 0)))
    assert answer(link) == m.HeartbeatAck(accept.session)
    late = DealerLink(f"tcp://{HERE}:{hub.ports[CONTROL]}", b"late", keys=keys)
    say(late, m.Heartbeat(accept.session, 0))
    assert isinstance(answer(late), m.Stale)
    for half in halves:
        half.close()
    link.close()
    late.close()
    cluster.nodes.clear()
    fleet.close("the test is over")


# --- the server's key, the list, and the addresses


def test_a_second_change_within_the_same_tick_of_the_disks_clock_is_seen(store: KeyStore) -> None:
    now = [store.nodes.stat().st_mtime + 0.01]
    access = Access(STRANGER, store, wall=lambda: now[0])
    access.refresh()
    assert access.name_of(A.public) == "a"
    stamp = store.nodes.stat()
    store.forget("a")
    os.utime(store.nodes, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    now[0] += 0.2
    access.refresh()
    assert access.name_of(A.public) is None


def test_the_name_of_a_node_that_this_run_starts_belongs_to_the_key_that_it_was_given(store: KeyStore) -> None:
    access = Access(STRANGER, store)
    access.refresh()
    keys = access.keys_for("a")
    assert access.name_of(keys.public) == "a"
    assert access.name_of(A.public) is None
    assert access.name_of(B.public) == "b"
    assert access.keys_for_host("mini-9") == access.keys_for_host("mini-9")


def test_a_resumed_run_keeps_its_key_and_a_new_run_has_that_of_this_mac(store: KeyStore, tmp_path: Path) -> None:
    first = server_pair(tmp_path, store, resume=False)
    assert first == store.coordinator_pair()
    (store.folder / "coordinator.key").unlink()
    assert store.coordinator_pair() != first
    assert server_pair(tmp_path, store, resume=True) == first
    assert server_pair(tmp_path, store, resume=False) == store.coordinator_pair()


def test_a_server_key_that_others_may_read_is_refused(store: KeyStore, tmp_path: Path) -> None:
    server_pair(tmp_path, store, resume=False)
    (tmp_path / "server.key").chmod(0o640)
    with pytest.raises(UserError, match="chmod 600"):
        server_pair(tmp_path, store, resume=True)


def ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as trial:
            trial.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not ipv6(), reason="this system has no IPv6")
@pytest.mark.parametrize("host", ["[::1]", HERE, "localhost"])
@pytest.mark.parametrize("addresses", [["::1", HERE], ["*"]])
def test_both_families_reach_the_ports(addresses: list[str], host: str, tmp_path: Path, store: KeyStore) -> None:
    (tmp_path / "state").mkdir()
    access = open_access(tmp_path / "state", store, resume=False)
    hub = RouterHub(addresses, 0, access)
    link = DealerLink(f"tcp://{host}:{hub.ports[DATA]}", b"a", keys=NodeKeys(A.secret, access.server.public))
    until(lambda: hub.receive(0.01) or link.receive(0.0) or link.send([b"x", b"y"]))
    (parcel,) = until(lambda: hub.receive(0.01))
    assert (parcel.channel, parcel.owner) == (DATA, "a")
    link.close()
    hub.close()


def test_only_the_chosen_address_is_bound() -> None:
    hub = RouterHub(["127.0.0.2"], 0)
    for port in hub.ports.values():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HERE, port))
        socket.create_connection(("127.0.0.2", port)).close()
    hub.close()


def test_an_address_of_another_machine_cannot_be_bound() -> None:
    with pytest.raises(ConfigError, match=r"coordinator.bind: 192.0.2.1 is not an address of this machine"):
        RouterHub(["192.0.2.1"], 0)


def test_libzmq_has_curve() -> None:
    assert zmq.has("curve")
