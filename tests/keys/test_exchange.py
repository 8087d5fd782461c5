"""The exchange of keys by a code: both sides learn the other's key; one who listens or relays learns nothing."""

import hmac
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest

from mlxdist.keys import exchange as e
from mlxdist.keys.invitation import MOST_TRIES, Invitation
from mlxdist.keys.pair import new_pair
from mlxdist.protocol.errors import MismatchError, UserError, WireError

CODE, OTHER_CODE = "4831-0927", "4831-0928"
NODE, COORDINATOR, STRANGER = (new_pair().public for _ in range(3))


def unchanged(message: bytes) -> bytes:
    return message


@dataclass
class Wire:
    """One exchange, with someone between the two Macs who may change each message."""

    hello: Callable[[bytes], bytes] = unchanged
    answer: Callable[[bytes], bytes] = unchanged
    proof: Callable[[bytes], bytes] = unchanged
    granted: Callable[[bytes], bytes] = unchanged

    def run(self, joiners: str = CODE, coordinators: str = CODE) -> tuple[str, str, str]:
        """Returns the joiner's key and name as the coordinator and the joiner know them, and the coordinator's key."""
        joiner = e.JoinersSide(joiners, "mini", NODE)
        coordinator = e.CoordinatorsSide(coordinators, COORDINATOR, 7550, self.hello(joiner.hello))
        coordinator.check(self.proof(joiner.proof(self.answer(coordinator.answer))))
        name = joiner.name(self.granted(coordinator.granted("mini-2")))
        return coordinator.hello.public, name, joiner.answer.public


def with_field(**fields: object) -> Callable[[bytes], bytes]:
    """Returns a change of these fields of a message."""

    def change(message: bytes) -> bytes:
        decoded = msgspec.msgpack.decode(message)
        assert fields.keys() <= decoded.keys()
        return msgspec.msgpack.encode({**decoded, **fields})

    return change


def test_each_side_learns_the_key_of_the_other_and_the_joiner_its_name() -> None:
    assert Wire().run() == (NODE, "mini-2", COORDINATOR)


def test_another_code_is_refused_before_the_coordinator_has_proven_anything() -> None:
    joiner = e.JoinersSide(OTHER_CODE, "mini", NODE)
    coordinator = e.CoordinatorsSide(CODE, COORDINATOR, 7550, joiner.hello)
    with pytest.raises(MismatchError):
        coordinator.check(joiner.proof(coordinator.answer))


def test_a_coordinator_that_does_not_know_the_code_is_not_believed() -> None:
    """It accepts every proof, and still cannot make one."""
    joiner = e.JoinersSide(CODE, "mini", NODE)
    false = e.CoordinatorsSide(OTHER_CODE, STRANGER, 7550, joiner.hello)
    joiner.proof(false.answer)
    with pytest.raises(MismatchError):
        joiner.name(false.granted("mini"))


@pytest.mark.parametrize(
    "wire",
    [
        Wire(hello=with_field(public=STRANGER)),
        Wire(hello=with_field(name="other")),
        Wire(answer=with_field(public=STRANGER)),
        Wire(answer=with_field(port=1)),
        Wire(granted=with_field(name="other")),
    ],
)
def test_a_man_in_the_middle_who_changes_a_key_a_name_or_a_port_is_found(wire: Wire) -> None:
    with pytest.raises(MismatchError):
        wire.run()


def test_a_recorded_exchange_cannot_be_played_again() -> None:
    joiner = e.JoinersSide(CODE, "mini", NODE)
    coordinator = e.CoordinatorsSide(CODE, COORDINATOR, 7550, joiner.hello)
    proof = joiner.proof(coordinator.answer)
    coordinator.check(proof)
    second = e.CoordinatorsSide(CODE, COORDINATOR, 7550, joiner.hello)
    with pytest.raises(MismatchError):
        second.check(proof)


def test_a_listener_cannot_try_codes_on_what_it_has_recorded() -> None:
    """Even the right code gives another key than theirs, without the numbers that the two Macs drew."""
    joiner = e.JoinersSide(CODE, "mini", NODE)
    coordinator = e.CoordinatorsSide(CODE, COORDINATOR, 7550, joiner.hello)
    proof = e.unpacked(joiner.proof(coordinator.answer), e.Proof)
    listener = e.JoinersSide(CODE, "mini", NODE)
    tried = e.unpacked(listener.proof(coordinator.answer), e.Proof)
    assert not hmac.compare_digest(proof.mac, tried.mac)
    said = joiner.hello + coordinator.answer
    assert CODE.encode() not in said
    assert CODE.replace("-", "").encode() not in said


@pytest.mark.parametrize(
    "element", [b"A" + b"\0" * 32, b"A" + b"\xff" * 32, b"A" + b"\1" + b"\0" * 31, b"B" + b"\2" * 32]
)
def test_an_element_that_is_none_is_refused(element: bytes) -> None:
    """Among them the neutral element, which would make the key known to all."""
    hello = with_field(element=element)(e.JoinersSide(CODE, "mini", NODE).hello)
    with pytest.raises(WireError):
        e.CoordinatorsSide(CODE, COORDINATOR, 7550, hello)


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"GET / HTTP/1.1", msgspec.msgpack.encode({"type": "Hello"}), b"\x91" * 900]
)
def test_other_bytes_are_no_message(data: bytes) -> None:
    with pytest.raises(WireError):
        e.unpacked(data, e.Hello)


def test_a_name_that_could_be_a_path_is_no_message() -> None:
    hello = with_field(name="../../x")(e.JoinersSide(CODE, "mini", NODE).hello)
    with pytest.raises(WireError):
        e.unpacked(hello, e.Hello)


@pytest.mark.parametrize("text", ["4831-0927", "48310927", " 4831 0927\n", "4831-0927\r\n"])
def test_a_code_is_read_as_people_type_it(text: str) -> None:
    assert e.code_of(text) == CODE


@pytest.mark.parametrize("text", ["", "4831", "4831-092", "4831-09277", "4831-o927", "٤٨٣١-٠٩٢٧"])
def test_another_text_is_no_code(text: str) -> None:
    with pytest.raises(UserError, match="two groups of four digits"):
        e.code_of(text)


def test_codes_are_random() -> None:
    codes = {e.new_code() for _ in range(200)}
    assert len(codes) > 195
    assert all(e.code_of(code) == code for code in codes)


def test_a_code_ends_after_five_exchanges_that_did_not_end_with_it_also_at_the_same_time() -> None:
    invitation = Invitation(macs=1, until=300.0)
    assert all(invitation.begin(1.0) for _ in range(MOST_TRIES))
    assert not invitation.begin(1.0)
    assert "another code" in invitation.over(1.0)


def test_the_right_code_gives_its_try_back() -> None:
    invitation = Invitation(macs=20, until=300.0)
    for _ in range(20):
        assert invitation.begin(1.0)
        assert invitation.joined(1.0)
    assert invitation.over(1.0) == "as many Macs as it was for have joined"


def test_a_code_is_for_so_many_macs_also_at_the_same_time() -> None:
    invitation = Invitation(macs=1, until=300.0)
    assert invitation.begin(1.0)
    assert invitation.begin(1.0)
    assert invitation.joined(2.0)
    assert not invitation.joined(2.0)


def test_a_code_ends_with_its_time_also_for_an_exchange_that_has_begun() -> None:
    invitation = Invitation(macs=1, until=300.0)
    assert invitation.begin(299.9)
    assert not invitation.joined(300.0)
    assert not invitation.begin(300.0)
    assert invitation.over(300.0) == "its time is over"
