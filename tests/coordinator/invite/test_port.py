"""The port where keys are exchanged, over loopback: limits on tries, time, Macs, bytes and connections."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from threading import Event

import msgspec
import pytest

from mlxdist.coordinator.invite.port import MOST_OF_ADDRESS, InvitationPort, Joinable
from mlxdist.keys.exchange import OFFSET, Granted, JoinersSide, framed, unpacked
from mlxdist.keys.invitation import Invitation
from mlxdist.keys.pair import new_pair
from mlxdist.keys.store import KeyStore
from mlxdist.node.pairing import Joined, Place, known, pair, receive
from mlxdist.protocol.errors import ConfigError, MismatchError, UserError, WireError

COORDINATOR = new_pair()
MIDDLE = new_pair().public
WRONG = "0000-0000"


@dataclass
class Office:
    """An invitation to a run on this machine, whose clock stands until a test sets it."""

    folder: Path
    macs: int = 1
    now: float = 0.0
    said: list[str] = field(default_factory=list)
    ended: Event = field(default_factory=Event)

    def __post_init__(self) -> None:
        self.run = Joinable(COORDINATOR.public, free_port(), ("127.0.0.1",), ("localhost", "mini"))
        self.store = self.home("coordinator")
        self.invitation = Invitation(self.macs, until=300.0, code="4831-0927")
        self.port = InvitationPort(
            self.invitation, self.run, self.store, self.said.append, clock=lambda: self.now, seconds=600.0
        )

    def home(self, name: str) -> KeyStore:
        return KeyStore(self.folder / name / ".mlxdist")

    def join(self, name: str, code: str = "4831-0927") -> Joined:
        """Joins from a Mac of this name."""
        return pair(self.home(name), Place("127.0.0.1", self.run.port), name, lambda: code)

    def knock(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.run.port + OFFSET), 30)


def free_port() -> int:
    """Returns a port after whose next one there is a free one."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1]) - OFFSET


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    office = Office(tmp_path)
    office.port.open()
    yield office
    office.port.close()


def test_both_sides_keep_the_key_of_the_other(office: Office) -> None:
    joined = office.join("studio")
    assert joined == known(office.home("studio"), Place("127.0.0.1"), "studio")
    assert joined.keys.coordinator == COORDINATOR.public
    assert joined.place.port == office.run.port
    nodes, _ = office.store.known_nodes()
    assert nodes["studio"].public == office.home("studio").own_pair().public
    files = [path for path in office.folder.rglob("*") if path.is_file()]
    assert len(files) == 3
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_a_name_that_is_taken_gets_a_number(office: Office) -> None:
    assert office.join("mini").name == "mini-2"


def test_a_mac_that_is_known_keeps_its_name(office: Office) -> None:
    office.store.admit("old", office.home("studio").own_pair().public, now=datetime.now(UTC))
    assert office.join("studio").name == "old"


def test_a_wrong_code_is_told_on_both_sides_and_nothing_is_kept(office: Office) -> None:
    with pytest.raises(UserError, match="the codes differ"):
        office.join("studio", WRONG)
    assert office.store.known_nodes() == ({}, [])
    assert known(office.home("studio"), Place("127.0.0.1"), "studio") is None
    office.join("studio")
    assert "127.0.0.1 tried to join without the right code: 4 of 5 tries are left" in office.said


def test_five_wrong_codes_end_the_code_for_the_right_one_too(office: Office) -> None:
    for _ in range(5):
        with pytest.raises(UserError, match="the codes differ"):
            office.join("thief", WRONG)
    with pytest.raises(UserError, match=r"has ended|takes no code now|ended the exchange"):
        office.join("studio")
    office.port.wait()
    assert "ended: it was tried 5 times with another code" in office.said[-1]


def test_the_port_closes_with_the_time_of_the_code(office: Office) -> None:
    office.now = 300.0
    office.port.wait()
    with pytest.raises(UserError, match=r"127\.0\.0\.1:\d+ takes no code now: .*gives a new code"):
        office.join("studio")
    assert "its time is over" in office.said[-1]


def test_the_port_closes_when_the_mac_has_joined(office: Office) -> None:
    office.join("studio")
    office.port.wait()
    with pytest.raises(UserError, match="takes no code now"):
        office.join("second")


def test_a_code_for_four_macs_serves_four(tmp_path: Path) -> None:
    office = Office(tmp_path, macs=4)
    office.port.open()
    assert [office.join(name).name for name in ("a", "b", "c", "d")] == ["a", "b", "c", "d"]
    office.port.wait()


def test_strangers_cost_no_try_and_keep_no_one_out(office: Office) -> None:
    """Browsers, long messages, connections that are cut or stay silent: more than one address may have."""
    for sent in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000, b"\0", b"", framed(b"\xc1")):
        with office.knock() as one:
            one.sendall(sent)
    silent = [office.knock() for _ in range(MOST_OF_ADDRESS + 3)]
    assert [one.recv(1) for one in silent[:3]] == [b""] * 3, "the oldest are closed"
    assert office.join("studio").name == "studio"
    assert office.invitation.tries == 5
    for one in silent:
        one.close()


def test_an_exchange_that_is_broken_off_costs_a_try(office: Office) -> None:
    with office.knock() as one:
        one.sendall(framed(JoinersSide(WRONG, "thief", new_pair().public).hello))
        assert one.recv(2)
    office.join("studio")
    assert any("4 of 5 tries are left" in sentence for sentence in office.said)


def test_a_second_invitation_to_a_run_is_refused_while_one_is_open(office: Office) -> None:
    second = InvitationPort(office.invitation, office.run, office.store, office.said.append)
    with pytest.raises(ConfigError, match="an invitation to this run is open already"):
        second.open()


@dataclass
class Relay:
    """A man in the middle: what he hears on his port goes on to the coordinator, changed as `change` does, and back."""

    to: int
    change: Callable[[bytes], bytes]
    heard: list[bytes] = field(default_factory=list)

    def __enter__(self) -> int:
        """Returns the control port that he pretends to have."""
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        return int(self.listener.getsockname()[1]) - OFFSET

    def _run(self) -> None:
        self.listener.accept()[0].close()  # the joiner looks first if someone is there
        with (
            self.listener.accept()[0] as joiner,
            socket.create_connection(("127.0.0.1", self.to + OFFSET), 60) as there,
            suppress(OSError, WireError),
        ):
            while True:
                for source, target in ((joiner, there), (there, joiner)):
                    self.heard.append(receive(source))
                    target.sendall(framed(self.change(self.heard[-1])))

    def __exit__(self, *_: object) -> None:
        self.thread.join()
        self.listener.close()


def own_key(message: bytes) -> bytes:
    """Returns a message with the key of the man in the middle instead of the one in it."""
    fields = msgspec.msgpack.decode(message)
    return msgspec.msgpack.encode(fields | ({"public": MIDDLE} if "public" in fields else {}))


def test_a_man_in_the_middle_with_keys_of_his_own_reaches_neither_side(office: Office) -> None:
    with Relay(office.run.port, own_key) as port, pytest.raises(UserError, match="the codes differ"):
        pair(office.home("studio"), Place("127.0.0.1", port), "studio", lambda: "4831-0927")
    assert office.store.known_nodes() == ({}, [])
    assert office.home("studio").coordinators() == []


def test_a_man_in_the_middle_who_only_relays_cannot_play_it_again_and_the_keys_are_those_of_the_two(
    office: Office,
) -> None:
    office.invitation.macs = 2
    relay = Relay(office.run.port, lambda message: message)
    with relay as port:
        joined = pair(office.home("studio"), Place("127.0.0.1", port), "studio", lambda: "4831-0927")
    assert joined.keys.coordinator == COORDINATOR.public
    assert list(office.store.known_nodes()[0]) == ["studio"]
    hello, _, proof, *_ = relay.heard
    with office.knock() as one:
        one.sendall(framed(hello))
        receive(one)
        one.sendall(framed(proof))
        with pytest.raises(MismatchError):
            unpacked(receive(one), Granted)
    assert office.invitation.tries == 4
