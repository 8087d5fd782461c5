"""Connections without a node: at most so many, at most so many bytes, and no address that keeps out another."""

import socket

from hypothesis import given
from hypothesis import strategies as st

from mlxdist.coordinator.fleet.connections import GONE, Source, plain_address, received_bytes, shut, source_of
from mlxdist.coordinator.fleet.doorway import LOOK_SECONDS, MOST_BYTES, Doorway


@given(st.lists(st.sampled_from("abc"), max_size=60), st.integers(1, 8))
def test_never_more_wait_than_may_and_the_address_with_most_pays(addresses: list[str], most: int) -> None:
    doorway, shut_down = Doorway(most), 0
    for number, address in enumerate(addresses):
        counts = [source.address for source in doorway.waiting.values()]
        closed = doorway.accepted(number, Source(address, number))
        assert len(doorway.waiting) <= most
        if closed is not None:
            shut_down += 1
            counts.append(address)
            assert counts.count(closed[1].address) == max(map(counts.count, set(counts)))
    assert len(doorway.take_refusals()) == shut_down == max(0, len(addresses) - most)


def test_a_single_connection_is_not_closed_for_a_crowd() -> None:
    doorway = Doorway(most=3)
    doorway.accepted(1, Source("node", 1))
    for number in range(2, 50):
        doorway.accepted(number, Source("crowd", number))
    assert doorway.waiting[1] == Source("node", 1)


def test_a_connection_that_sends_too_much_is_closed_unless_its_node_is_known() -> None:
    doorway = Doorway()
    for number in (1, 2, 3):
        doorway.accepted(number, Source("a", number))
    doorway.admitted(3)
    sent = {1: MOST_BYTES, 2: MOST_BYTES + 1, 3: 10 * MOST_BYTES}
    assert doorway.too_much(sent.__getitem__, 10.0) == [(2, Source("a", 2))]
    sent[1] += 1
    assert doorway.too_much(sent.__getitem__, 10.0 + LOOK_SECONDS / 2) == []
    assert doorway.too_much(sent.__getitem__, 10.0 + 2 * LOOK_SECONDS) == [(1, Source("a", 1))]
    assert len(doorway.take_refusals()) == 2
    assert doorway.take_refusals() == []


def test_the_end_of_a_connection_is_a_refusal_only_before_its_node_is_known() -> None:
    doorway = Doorway()
    doorway.accepted(1, Source("a", 1))
    doorway.accepted(2, Source("b", 2))
    doorway.admitted(1)
    doorway.closed(1)
    doorway.failed("its key is not known here")
    doorway.closed(2)
    assert [tuple(each) for each in doorway.take_refusals()] == [("b", "its key is not known here")]


def test_an_end_that_is_told_before_its_beginning_is_a_refusal_and_does_not_wait() -> None:
    """Several threads of libzmq tell of the same connection."""
    doorway = Doorway(most=1)
    doorway.closed(5)
    doorway.accepted(5, Source("a", 1))
    assert doorway.waiting == {}
    assert [each.address for each in doorway.take_refusals()] == ["a"]
    doorway.accepted(5, Source("b", 2))
    assert doorway.waiting == {5: Source("b", 2)}
    doorway.accepted(6, Source("b", 3))
    doorway.closed(5)  # it was closed for the other one
    doorway.accepted(5, Source("c", 4))
    assert 5 in doorway.waiting or 6 in doorway.waiting
    doorway.closed(6)
    doorway.closed(5)
    assert doorway.waiting == {}
    doorway.accepted(6, Source("d", 5))
    assert doorway.waiting == {6: Source("d", 5)}


def test_the_system_knows_the_other_end_and_its_bytes_and_ends_only_that_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        end, _ = server.accept()
        with end:
            source = source_of(end.fileno())
            assert source == Source("127.0.0.1", client.getsockname()[1])
            client.sendall(bytes(5000))
            assert len(end.recv(5000, socket.MSG_WAITALL)) == 5000
            assert received_bytes(end.fileno()) == 5000
            shut(end.fileno(), Source("127.0.0.1", source.port + 1))
            shut(end.fileno(), GONE)
            client.sendall(b"x")
            assert end.recv(1) == b"x"
            shut(end.fileno(), source)
            assert client.recv(1) == b""
        number = end.fileno()
    assert source_of(number) == GONE
    assert received_bytes(number) == 0


def test_an_address_has_one_form() -> None:
    assert plain_address("::ffff:10.0.0.1") == "10.0.0.1"
    assert plain_address("10.0.0.1") == "10.0.0.1"
    assert plain_address("fe80::1%eth0") == "fe80::1%eth0"
