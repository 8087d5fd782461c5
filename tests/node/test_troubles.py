"""A connection that cannot be made is a sentence within seconds, said once, and no silent retry."""

import threading
from dataclasses import dataclass, field

import pytest

from mlxdist.keys.pair import NodeKeys, new_pair
from mlxdist.node.link.addresses import addresses, join_endpoint, split_endpoint
from mlxdist.node.link.troubles import sentence_on
from mlxdist.node.supervisor import Supervisor
from mlxdist.protocol.transport import Trouble
from mlxdist.protocol.wire import Frames

OWN, COORDINATOR = new_pair(), new_pair()
KEYS = NodeKeys(OWN.secret, COORDINATOR.public)


@dataclass
class RefusedLink:
    """A connection with these troubles, one for each wait of half a second, that is never made."""

    troubles: list[Trouble | None]
    now: float = 0.0
    sent: list[Frames] = field(default_factory=list)

    @property
    def trouble(self) -> Trouble | None:
        """Returns the trouble of now; after the last one, none."""
        return self.troubles[0] if self.troubles else None

    def receive(self, timeout: float) -> list[Frames]:
        """Returns nothing, and goes on to the next trouble."""
        self.now += timeout
        self.troubles = self.troubles[1:]
        return []

    def send(self, frames: Frames) -> bool:
        """Takes nothing: there is no connection."""
        return False

    def renew(self) -> None:
        """Does nothing."""

    def wake(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def said(troubles: list[Trouble | None], *, launched: bool) -> tuple[list[str], int, str]:
    """Returns the lines of a supervisor, its exit code, and its reason."""
    link, lines = RefusedLink([None, *troubles]), list[str]()
    one = Supervisor(
        "mini-1",
        "10.0.0.1",
        link,
        launched=launched,
        wait_seconds=10.0,
        port=5555,
        keys=KEYS,
        clock=lambda: link.now,
        say=lines.append,
    )
    return lines, one.run(threading.Event()), one.reason


def test_a_node_started_by_hand_says_each_trouble_once_and_goes_on() -> None:
    refused, ended = Trouble.KEY_REFUSED, Trouble.ENDED
    lines, code, reason = said([refused, refused, ended, refused, ended], launched=False)
    assert len(lines) == 2
    assert f"mlxdist nodes admit mini-1 {OWN.public}" in lines[0]
    assert COORDINATOR.public in lines[1]
    assert (code, reason) == (1, "no coordinator for 10 s")


def test_a_trouble_that_comes_back_after_a_connection_is_said_again() -> None:
    assert len(said([Trouble.KEY_REFUSED, None, Trouble.KEY_REFUSED], launched=False)[0]) == 2


def test_a_launched_node_leaves_with_the_sentence() -> None:
    lines, code, reason = said([Trouble.KEY_REFUSED], launched=True)
    assert lines == []
    assert code == 1
    assert "does not accept the key of this node" in reason


@pytest.mark.parametrize("keys", [KEYS, None])
@pytest.mark.parametrize("trouble", Trouble)
def test_every_sentence_names_the_place_and_something_to_do_and_no_secret(
    trouble: Trouble, keys: NodeKeys | None
) -> None:
    sentence = sentence_on(trouble, "mini-0.local:5555", "mini-1", keys)
    assert "mini-0.local:5555" in sentence
    assert "`" in sentence or "--" in sentence
    assert OWN.secret not in sentence


@pytest.mark.parametrize("host", ["10.0.0.1", "mini-0.local", "fe80::1%en0", "::1"])
def test_an_endpoint_keeps_its_host_and_port(host: str) -> None:
    assert split_endpoint(join_endpoint(host, 5555)) == (host, 5555)


def test_a_host_has_numeric_addresses_or_stays_as_it_is() -> None:
    assert "127.0.0.1" in addresses("localhost")
    assert addresses("10.0.0.1") == ["10.0.0.1"]
    assert addresses("fe80::1%1") == ["fe80::1%1"]
    assert addresses("no host at all") == ["no host at all"]
