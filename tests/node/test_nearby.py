"""Coordinators that Bonjour finds: recorded outputs of dns-sd and avahi-browse, and the choice among what is there."""

import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mlxdist.bonjour import Service, avahi_services, find, instances, resolved
from mlxdist.keys.pair import new_pair
from mlxdist.keys.store import KeyStore
from mlxdist.node.nearby import chosen
from mlxdist.node.pairing import Joined, Place
from mlxdist.protocol.errors import UserError

BROWSE = """Browsing for _ssh._tcp
DATE: ---Mon 01 Dec 2025---
12:00:00.000  ...STARTING...
Timestamp     A/R    Flags  if Domain               Service Type         Instance Name
12:00:00.123  Add        3   6 local.               _ssh._tcp.           mini-1
12:00:00.124  Add        3   6 local.               _ssh._tcp.           Ada's Mac mini (2)
12:00:00.124  Add        2  14 local.               _ssh._tcp.           mini-1
12:00:01.500  Add        2   6 local.               _ssh._tcp.           gone
12:00:02.500  Rmv        0   6 local.               _ssh._tcp.           gone
"""
RESOLVE = """Lookup Ada's Mac mini (2)._mlxdist._tcp.local
DATE: ---Mon 01 Dec 2025---
12:00:00.000  ...STARTING...
12:00:00.045  Ada\\039s\\032mini\\032(2)._mlxdist._tcp.local. can be reached at Adas-Mac-2.local.:7550 (interface 6)
 key=0123456789abcdef
"""
AVAHI = """+;eth0;IPv4;mini-1;_mlxdist._tcp;local
+;eth0;IPv6;mini-1;_mlxdist._tcp;local
=;eth0;IPv4;mini-1;_mlxdist._tcp;local;mini-1.local;10.0.0.2;7550;"key=0123456789abcdef"
=;eth0;IPv4;Ada\\039s\\032Mac;_mlxdist._tcp;local;adas-mac.local;10.0.0.3;7553;"x=1;2" "key=fedcba9876543210"
"""
NOW = datetime(2026, 5, 1, tzinfo=UTC)
ONE, TWO, STRANGER = (new_pair().public for _ in range(3))


def test_services_are_read_from_what_macos_prints() -> None:
    assert instances("_ssh._tcp", BROWSE) == [("mini-1", "local."), ("Ada's Mac mini (2)", "local.")]
    assert resolved(RESOLVE) == Service("Adas-Mac-2.local", 7550, {"key": "0123456789abcdef"})


def test_services_are_read_from_what_avahi_prints() -> None:
    ada, mini = avahi_services(AVAHI)
    assert ada == Service("adas-mac.local", 7553, {"x": "1;2", "key": "fedcba9876543210", "address": "10.0.0.3"})
    assert mini == Service("mini-1.local", 7550, {"key": "0123456789abcdef", "address": "10.0.0.2"})


@pytest.mark.parametrize("order", [1, -1])
def test_a_host_with_addresses_of_both_kinds_is_reached_at_the_one_that_works_everywhere(order: int) -> None:
    """As avahi-browse of Debian prints a host with both; the rows come in any order."""
    rows = [
        '=;eth0;IPv6;mini-1;_mlxdist._tcp;local;mini-1.local;fe80::9848:b2ff:feae:b17f;7550;"key=0123"',
        '=;eth0;IPv4;mini-1;_mlxdist._tcp;local;mini-1.local;10.78.0.1;7550;"key=0123"',
    ]
    (mini,) = avahi_services("\n".join(rows[::order]))
    assert mini.texts["address"] == "10.78.0.1"
    (mini,) = avahi_services(rows[0])
    assert mini.texts["address"] == "fe80::9848:b2ff:feae:b17f%eth0"


@pytest.mark.parametrize("printed", ["", "DNSService call failed -65537", "...STARTING...", "=;eth0;;;", "=;" * 12])
def test_other_output_names_no_service(printed: str) -> None:
    assert instances("_ssh._tcp", printed) == avahi_services(printed) == []
    assert resolved(printed) is None


def test_without_a_way_to_look_the_address_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    with pytest.raises(UserError, match=r"nothing here can look for Macs.*: give the address"):
        find("_mlxdist._tcp", "give the address")


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path / ".mlxdist")


def at(host: str, public: str, port: int = 7550) -> Service:
    return Service(host, port, {"key": public[:16]})


def know(store: KeyStore, *hosts: tuple[str, str]) -> None:
    for host, public in hosts:
        store.trust(host, public, now=NOW, port=7553, name="me")


def test_a_mac_that_knows_no_coordinator_asks_the_only_one_there_is(store: KeyStore) -> None:
    assert chosen(store, [], [at("mini.local", ONE)], "x") == Place("mini.local", 7550)


def test_a_run_of_a_known_coordinator_is_found_at_its_new_address_and_port(store: KeyStore) -> None:
    know(store, ("old.local", ONE), ("other.local", TWO))
    found = chosen(store, store.coordinators(), [at("new.local", ONE, 7556), at("evil.local", STRANGER)], "x")
    assert isinstance(found, Joined)
    assert (found.place, found.name, found.keys.coordinator) == (Place("new.local", 7556), "me", ONE)


def test_a_known_coordinator_without_a_run_is_waited_for(store: KeyStore) -> None:
    """And a stranger who announces a run is not asked instead."""
    know(store, ("mini.local", ONE))
    found = chosen(store, store.coordinators(), [at("evil.local", STRANGER)], "x")
    assert isinstance(found, Joined)
    assert (found.place, found.keys.coordinator) == (Place("mini.local", 7553), ONE)


def test_two_coordinators_in_one_network_are_named_with_the_commands(store: KeyStore) -> None:
    both = [at("mini.local", ONE), at("studio.local", TWO)]
    with pytest.raises(UserError, match=r"type one of: mlxdist join mini.local:7550 \| mlxdist join studio.local:7550"):
        chosen(store, [], both, "x")
    know(store, ("a.local", ONE), ("b.local", TWO))
    with pytest.raises(UserError, match=r"type one of: mlxdist join mini.local:7550 \| mlxdist join studio.local:7550"):
        chosen(store, store.coordinators(), both, "x")
    with pytest.raises(UserError, match=r"type one of: mlxdist join a.local \| mlxdist join b.local"):
        chosen(store, store.coordinators(), [], "x")


def test_coordinators_that_are_told_by_address_have_their_names_beside_them(store: KeyStore) -> None:
    both = [Service(name, 7550, {"address": address}) for name, address in (("a.local", "10.0.0.2"), ("b", "b"))]
    with pytest.raises(UserError, match=r"mlxdist join 10\.0\.0\.2:7550 \(a\.local\) \| mlxdist join b:7550$"):
        chosen(store, [], both, "x")


def test_no_coordinator_at_all_asks_for_the_address(store: KeyStore) -> None:
    with pytest.raises(UserError, match="give the address"):
        chosen(store, [], [], "x")
