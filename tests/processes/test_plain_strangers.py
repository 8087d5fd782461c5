"""Strangers at the plain ports of a coordinator at work: they are refused, and no bit of its gradients changes."""

import os
import socket
import ssl
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from mlxdist.coordinator.fleet.connections import GONE, source_of
from mlxdist.coordinator.fleet.sockets import MOST_EVENTS, RouterHub
from mlxdist.protocol import messages as m
from mlxdist.protocol.transport import CONTROL, DATA
from mlxdist.protocol.wire import MAGIC, PREAMBLE, encode
from scripts.local_cluster import free_ports
from tests.processes.thieves import Repeated
from tests.processes.thread_nodes import HERE, Coordinator, Loads, config_of, start_coordinator, thread_nodes

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)  # of ZMTP 3
HALF_OPEN = 1500  # connections
MOST_STEPS = 2000


def plain(port: int, *words: bytes) -> None:
    """Opens a TCP connection, says some words, and waits a moment for an answer or the end."""
    with socket.create_connection((HERE, port)) as stranger:
        stranger.settimeout(0.2)
        with suppress(OSError):
            for word in words:
                stranger.sendall(word)
            while stranger.recv(4096):
                pass


def dealer(port: int, *messages: list[bytes]) -> None:
    """Says messages as a peer that knows ZeroMQ, and reads no answer."""
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 200)
    peer.connect(f"tcp://{HERE}:{port}")
    for frames in messages:
        peer.send_multipart(frames)
    peer.poll(100)
    peer.close()
    context.term()


def http(port: int) -> None:
    plain(port, b"GET / HTTP/1.1\r\nHost: mini-1\r\n\r\n")


def tls(port: int) -> None:
    context = ssl.create_default_context()
    with socket.create_connection((HERE, port)) as stranger, suppress(OSError):
        stranger.settimeout(0.2)
        context.wrap_socket(stranger, server_hostname="mini-1")


def port_scan(port: int) -> None:
    for _ in range(100):
        socket.create_connection((HERE, port)).close()


def resets(port: int) -> None:
    for _ in range(100):
        with socket.create_connection((HERE, port)) as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stranger.sendall(GREETING[:20])


def slow_handshakes(port: int) -> None:
    plain(port, *(GREETING[index : index + 1] for index in range(40)))


def oversized_frames(port: int) -> None:
    dealer(port, [bytes(3 << 20)])
    plain(port, GREETING, b"\x02" + (1 << 62).to_bytes(8, "big"), bytes(1 << 16))


def no_message(port: int) -> None:
    too_long = [b"x"] * 50  # the last: it ends the connection, and what came after it would use another one
    dealer(port, [b"\x00" * 50], [b"mlxd"], [b""], [PREAMBLE.pack(MAGIC, 1, 0, 0), b"\xc1", b""], too_long)


def garbage(port: int) -> None:
    no_message(port)
    plain(port, GREETING, bytes(range(256)) * 20)


def another_version(port: int) -> None:
    register = msgspec.msgpack.encode({"type": "Register", "protocol": 2, "name": "new", "worker": 0, "host": {}})
    dealer(port, [PREAMBLE.pack(MAGIC, 2, 0, 0), register, b""], [PREAMBLE.pack(MAGIC, 1, 0, 0), register, b""])


def old_session(port: int) -> None:
    session = m.SessionId("run", 5, "0" * 32)
    dealer(port, *([bytes(frame) for frame in encode(one)] for one in (m.Leave(session), m.Pong(session))))


ATTACKS: tuple[Callable[[int], None], ...] = (http, tls, garbage, another_version, old_session)
LONGER: tuple[Callable[[int], None], ...] = (port_scan, resets, slow_handshakes, oversized_frames)


@pytest.fixture(scope="module")
def at_work(model: Path) -> Iterator[tuple[Coordinator, bytes]]:
    """A coordinator with a node, and the undisturbed gradient."""
    port = free_ports()
    coordinator = start_coordinator(config_of(model), port)
    with thread_nodes(("a", HERE, port)) as (node,):
        coordinator.send_adapter()
        coordinator.fleet.wait_for_nodes(1, 1, 60.0)
        session = coordinator.cluster.nodes["a"].session
        yield coordinator, coordinator.gradient().tobytes()
        assert coordinator.cluster.nodes["a"].session == session
        assert not coordinator.cluster.offenders.errors
        assert isinstance(node.engine, Loads)
        assert node.engine.loaded == 1
        coordinator.fleet.close("the test is over")


def works_while(at_work: tuple[Coordinator, bytes], attack: Repeated, times: int = 2) -> None:
    """Computes gradients until the attack was made a few times; each has the right bits."""
    coordinator, whole = at_work
    assert coordinator.cluster.round is not None
    first = coordinator.cluster.round.request.step
    with attack:
        for step in range(first + 1, first + MOST_STEPS):
            assert coordinator.gradient(step).tobytes() == whole
            if attack.times >= times or attack.errors:
                return
    raise AssertionError("the attack does not end")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("attack", [no_message, another_version], ids=["no message", "another version"])
def test_who_sends_no_message_of_ours_is_counted_and_said_once(
    at_work: tuple[Coordinator, bytes], attack: Callable[[int], None]
) -> None:
    coordinator, whole = at_work
    cluster = coordinator.cluster
    refused, lines = cluster.offenders.refused, coordinator.sentences.count("a message was refused")
    attack(coordinator.hub.ports[CONTROL])
    step = cluster.round.request.step  # type: ignore[union-attr]
    while cluster.offenders.refused == refused:
        step += 1
        assert coordinator.gradient(step).tobytes() == whole
    coordinator.gradient(step + 1)
    said = coordinator.sentences.count("a message was refused") - lines
    assert said == 1, "one line for each connection and minute"
    assert cluster.offenders.refused > refused


def few_files(most: int) -> None:
    """Waits until this process has no more open files: libzmq closes what strangers have left in its own time."""
    while psutil.Process().num_fds() > most:
        threading.Event().wait(0.05)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "attack",
    [*ATTACKS, *(pytest.param(attack, marks=pytest.mark.slow) for attack in LONGER)],
    ids=lambda attack: attack.__name__.replace("_", " "),
)
@pytest.mark.parametrize("channel", [CONTROL, pytest.param(DATA, marks=pytest.mark.slow)])
def test_a_stranger_changes_nothing(
    at_work: tuple[Coordinator, bytes], channel: str, attack: Callable[[int], None]
) -> None:
    coordinator, _ = at_work
    port = coordinator.hub.ports[channel]
    files = psutil.Process().num_fds()
    works_while(at_work, Repeated(lambda: attack(port)))
    assert coordinator.cluster.nodes.keys() == {"a"}
    few_files(files + 100)


HOLDS = f"""
import resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = []
for number in range({HALF_OPEN}):
    held.append(socket.create_connection(("{HERE}", int(sys.argv[1 + number % 2]))))
    try:
        held[-1].sendall({GREETING!r}[: number % 60])
    except OSError:  # it may be closed already
        pass
print("held", flush=True)
for stranger in held:
    stranger.settimeout(60)
    try:
        while stranger.recv(4096):
            pass
    except ConnectionError:
        pass
print("closed", flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_thousand_half_open_connections_change_nothing_and_are_closed(at_work: tuple[Coordinator, bytes]) -> None:
    """They say nothing, or stop in the middle of the greeting. Meanwhile another node joins."""
    coordinator, whole = at_work
    files, ports = psutil.Process().num_fds(), map(str, coordinator.hub.ports.values())
    command = [sys.executable, "-c", HOLDS, *ports]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as strangers:
        assert strangers.stdout is not None
        says = iter(strangers.stdout)
        assert next(says) == "held\n"
        with thread_nodes(("late", HERE, coordinator.hub.ports[CONTROL])):
            coordinator.fleet.wait_for_nodes(2, 2, 60.0)
            step = coordinator.cluster.round.request.step + 1  # type: ignore[union-attr]
            assert coordinator.gradient(step).tobytes() == whole
        works_while(at_work, Repeated(lambda: next(says, "")))  # until all are closed: none was ready in time
    assert strangers.returncode == 0
    few_files(files + 100)


def test_a_flood_of_connections_keeps_no_message_out() -> None:
    """Their beginnings are noted a few at a time: messages and the cluster's clock have their turn in between."""
    hub = RouterHub([HERE], 0)
    with ExitStack() as flood:
        for _ in range(MOST_EVENTS + 50):
            stranger = flood.enter_context(socket.create_connection((HERE, hub.ports[CONTROL])))
            stranger.settimeout(30.0)
            assert stranger.recv(1), "the greeting of libzmq, which has told of the connection before"
        noted = []
        for _ in range(2):
            hub.receive(0.0)
            noted.append(len(hub._doorway.waiting))
    hub.close()
    assert noted == [MOST_EVENTS, MOST_EVENTS + 50]


def test_looking_at_a_number_that_is_no_connection_any_more_leaves_no_file_open() -> None:
    """A connection that is gone at once leaves its number to any other file."""
    ends = os.pipe()
    files = psutil.Process().num_fds()
    assert {source_of(ends[0]) for _ in range(50)} == {GONE}
    assert psutil.Process().num_fds() == files
    for end in ends:
        os.close(end)
