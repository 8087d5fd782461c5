"""Hostile peers at the real ports of a real fleet: no message of theirs ends the run, fills the memory, or speaks for
another node.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import zmq

from mlxdist.coordinator.cluster.cluster import Cluster
from mlxdist.coordinator.cluster.settings import ClusterSettings
from mlxdist.coordinator.fleet.doorway import MOST_WAITING
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.fleet.sockets import RouterHub
from mlxdist.protocol import messages as m
from mlxdist.protocol.transport import CONTROL, DATA
from mlxdist.protocol.wire import MAGIC, PREAMBLE, decode, encode
from scripts.attack import greeting, measure
from tests.coordinator.cluster.scripted_node import SPEC, VERSIONS

HERE = "127.0.0.1"
SESSION = ("run", 5, "0" * 32)


@dataclass
class Port:
    """A coordinator, and how to speak to it."""

    cluster: Cluster
    fleet: Fleet
    hub: RouterHub
    context: "zmq.Context[Any]"
    sockets: "list[zmq.Socket[bytes]]" = field(default_factory=list)

    def peer(self, channel: str = CONTROL, identity: bytes = b"") -> "zmq.Socket[bytes]":
        dealer = self.context.socket(zmq.DEALER)
        self.sockets.append(dealer)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, 20_000)
        if identity:
            dealer.setsockopt(zmq.IDENTITY, identity)
        dealer.connect(f"tcp://{HERE}:{self.hub.ports[channel]}")
        return dealer

    def joined(self, name: str = "honest") -> tuple["zmq.Socket[bytes]", m.SessionId]:
        """A supervisor that has registered, and its session."""
        dealer = self.peer()
        dealer.send_multipart(encode(m.Register(m.PROTOCOL_VERSION, name, 0, {})))
        accept = answer(dealer)
        assert isinstance(accept, m.Accept)
        return dealer, accept.session


def answer(dealer: "zmq.Socket[bytes]") -> m.Message:
    return decode(dealer.recv_multipart())[0]


def last_answer(stranger: "zmq.Socket[bytes]") -> m.Message:
    """The next answer. A stranger that had sent too much was cut off, so it says its last message again and again."""
    for _ in range(40):
        stranger.send_multipart(encode(m.Heartbeat(m.SessionId(*SESSION), 0)))  # answered when all before it was read
        try:
            return answer(stranger)
        except zmq.Again:
            continue
    raise AssertionError("it was never answered")


def beats(dealer: "zmq.Socket[bytes]", session: m.SessionId) -> bool:
    """True if a heartbeat is answered."""
    dealer.send_multipart(encode(m.Heartbeat(session, 0)))
    return answer(dealer) == m.HeartbeatAck(session)


def header(**fields: Any) -> list[bytes]:
    return [PREAMBLE.pack(MAGIC, m.PROTOCOL_VERSION, 0, 0), msgspec.msgpack.encode(fields), b""]


@pytest.fixture
def port() -> Iterator[Port]:
    hub = RouterHub([HERE], 0)
    cluster = Cluster(ClusterSettings("run", 5, SPEC, VERSIONS, hub.ports[DATA]))
    fleet, context = Fleet(cluster, hub), zmq.Context()
    opened = Port(cluster, fleet, hub, context)
    yield opened
    assert fleet._thread is not None
    assert fleet._thread.is_alive()
    assert cluster.failure is None
    for each in opened.sockets:
        each.close(0)
    context.term()
    cluster.nodes.clear()  # none would say goodbye
    fleet.close("the test is over")


LONG = "\x1b[2J\nforged: line\u202e" * 200_000
HOSTILE: dict[str, list[bytes]] = {
    "a run name of 4 MB": header(type="Leave", session=[LONG, 5, "1"]),
    "a type of 4 MB": header(type=LONG),
    "a field name of 4 MB": header(**{"type": "Leave", "session": list(SESSION), LONG: 1}),
    "a node name of 4 MB": header(type="Register", protocol=1, name=LONG, worker=0, host={}),
    "a number of 5,000 digits": header(
        type="Register", protocol=1, name="a", worker=0, host={"memory_bytes": "9" * 5000}
    ),
    "a number of 200 digits": header(type="Register", protocol=1, name="a", worker=0, host={"memory_bytes": "9" * 200}),
    "a million lines": header(type="Log", session=list(SESSION), lines=["x"] * 1_000_000),
    "another protocol with a long name": header(
        type="Register", protocol=7, name="\x1b]0;owned\x07" * 10, worker=0, host={}
    ),
    "forty frames": [bytes(1 << 20)] * 40,
    "a thousand frames": [b"x"] * 1000,
    "nothing": [b""],
    "HTTP": [b"GET / HTTP/1.1"],
}


@pytest.mark.parametrize("channel", [CONTROL, DATA])
@pytest.mark.parametrize("frames", HOSTILE.values(), ids=HOSTILE)
def test_one_message_of_a_stranger_changes_nothing_for_the_others(
    port: Port, channel: str, frames: list[bytes]
) -> None:
    honest, session = port.joined()
    stranger = port.peer(channel)
    for _ in range(3):
        stranger.send_multipart(frames)
    stranger.setsockopt(zmq.RCVTIMEO, 500)
    while not isinstance(reply := last_answer(stranger), m.Stale):
        assert isinstance(reply, m.Reject | m.Accept)
        if isinstance(reply, m.Reject):
            assert len(reply.reason) < 600
            assert reply.reason.isprintable()
    assert beats(honest, session)
    assert all(len(news.message) < 600 and news.message.isprintable() for news in port.cluster.news)


def test_a_message_that_makes_an_error_here_costs_its_sender_the_session_and_is_counted(port: Port) -> None:
    """Any error: here the handler of a message is broken on purpose."""
    honest, session = port.joined()
    other, others = port.joined("other")

    def broken(*values: object, **options: object) -> Any:
        raise AssertionError("a mistake \x1b[2J of ours" * 100)

    handler, port.cluster.members.on_control = port.cluster.members.on_control, broken  # type: ignore[method-assign]
    other.send_multipart(encode(m.Log(others, ("x",))))
    stale = answer(other)
    port.cluster.members.on_control = handler  # type: ignore[method-assign]
    assert isinstance(stale, m.Stale)
    assert stale.over
    assert beats(honest, session)
    assert port.cluster.offenders.errors == 1
    assert isinstance(port.cluster.offenders.first_error, AssertionError)
    assert port.cluster.nodes["other"].gone
    assert all(news.message.isprintable() for news in port.cluster.news)


def test_lines_and_sentences_of_a_node_are_shown_escaped_and_cut(port: Port) -> None:
    honest, session = port.joined()
    honest.send_multipart(encode(m.Log(session, ("\x1b[31mred\x1b[0m\r\nmlxdist: the run is over",))))
    honest.send_multipart(encode(m.WorkerExit(session, "why\nnot: \x07" * 100, ("\x1b[2J" * 100,))))
    assert beats(honest, session)
    for news in port.cluster.news:
        for line in news.message.split("\n"):
            assert line.isprintable()
        assert all(line.startswith("  | ") for line in news.message.split("\n")[1:])


def test_sessions_are_random(port: Port) -> None:
    sessions = [port.joined(f"node-{place}")[1] for place in range(20)]
    assert len({session.number for session in sessions}) == 20
    assert all(len(session.number) == 32 and int(session.number, 16) >= 0 for session in sessions)


@pytest.mark.parametrize("kind", [m.Leave, m.Heartbeat, m.Log, m.WorkerExit])
def test_a_message_counts_only_from_the_connection_that_its_session_was_given_to(port: Port, kind: type) -> None:
    """Even a thief of the session number, or of a whole frame, does not speak for the node on another connection."""
    honest, session = port.joined()
    values: dict[type, Any] = {
        m.Leave: m.Leave(session),
        m.Heartbeat: m.Heartbeat(session, 77),
        m.Log: m.Log(session, ("forged",)),
        m.WorkerExit: m.WorkerExit(session, "forged", ()),
    }
    thief = port.peer()
    thief.send_multipart(encode(values[kind]))
    stale = answer(thief)
    assert isinstance(stale, m.Stale)
    assert "another connection" in stale.what
    assert beats(honest, session)
    node = port.cluster.nodes["honest"]
    assert (node.gone, node.worker.pid, node.worker.ended) == (False, 0, False)
    assert not any("forged" in news.message for news in port.cluster.news)


def test_a_second_hello_from_another_connection_changes_nothing(port: Port) -> None:
    honest, session = port.joined()
    worker, thief = port.peer(DATA, b"a"), port.peer(DATA, b"b")
    worker.send_multipart(encode(m.Hello(session, VERSIONS)))
    assert isinstance(answer(worker), m.Welcome)
    thief.send_multipart(encode(m.Hello(session, VERSIONS)))
    assert isinstance(answer(thief), m.Stale)
    assert beats(honest, session)
    assert port.cluster.nodes["honest"].session == session
    assert port.cluster.nodes["honest"].worker.data == b"a"


def test_a_peer_that_does_not_read_is_not_answered_for_ever(port: Port) -> None:
    honest, session = port.joined()
    stranger = port.peer()
    for _ in range(2000):
        stranger.send_multipart([b"x"])
    stranger.send_multipart(encode(m.Register(m.PROTOCOL_VERSION, "late", 0, {})))
    answers = 0
    stranger.setsockopt(zmq.RCVTIMEO, 1000)
    while port.cluster.offenders.refused < 2000:
        threading.Event().wait(0.01)
    try:
        while True:
            stranger.recv_multipart()
            answers += 1
    except zmq.Again:
        pass
    assert 1 <= answers <= 200
    assert beats(honest, session)
    assert sum("refused" in news.message for news in port.cluster.news) == 1


def test_a_message_of_many_frames_costs_a_registered_peer_its_connection(port: Port) -> None:
    """Without encryption a stranger may register; after that its bytes are not counted any more."""
    honest, session = port.joined()
    other, _ = port.joined("other")
    monitor = other.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    other.send_multipart([b"x"] * 5)
    assert monitor.poll(20_000), "the connection was not closed"
    other.disable_monitor()
    monitor.close(0)
    assert beats(honest, session)
    assert any("a message of over 3 frames" in news.message for news in port.cluster.news)


def test_a_message_without_an_end_costs_its_sender_the_connection(port: Port) -> None:
    """libzmq collects the frames of a message before it hands them over, and has no limit on their number."""
    honest, session = port.joined()
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    frame = b"\x03" + (1 << 18).to_bytes(8, "big") + bytes(1 << 18)  # a long one, and more to come
    sent = 0
    with socket.create_connection((HERE, port.hub.ports[CONTROL])) as stranger:
        stranger.sendall(greeting(b"NULL") + b"\x04" + bytes([len(ready)]) + ready)
        with suppress(OSError):  # it is closed from the other side
            while sent < 64 << 20:
                stranger.sendall(frame)
                sent += len(frame)
                threading.Event().wait(0.005)
    assert sent < 64 << 20
    while not any("it sent 1 MiB before its node was known" in news.message for news in port.cluster.news):
        threading.Event().wait(0.01)
    assert beats(honest, session)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("encrypted", [False, True])
def test_many_hostile_peers_take_little_memory_and_no_run(encrypted: bool) -> None:
    cost = measure(peers=32, seconds=5.0, encrypted=encrypted)
    assert cost["failure"] == ""
    assert cost["errors"] == 0
    assert cost["honest_node"] == "connecting"
    assert cost["refused"] > 0
    assert cost["rss_most_mb"] - cost["rss_before_mb"] < (60 if encrypted else 200), cost
    assert cost["fds_most"] <= cost["fds_before"] + MOST_WAITING + 2 * 32, cost
    assert cost["fds_after"] <= cost["fds_before"] + 16, cost
    if encrypted:
        assert cost["nodes"] == 1
