"""Attacks a coordinator on loopback with hostile peers for a bounded time, and prints what it cost as JSON.

    python scripts/attack.py --peers 64 --seconds 300              # a run on loopback, without encryption
    python scripts/attack.py --peers 64 --seconds 300 --encrypted  # as beyond loopback: strangers without a key

The coordinator is a real cluster and fleet over real ports in this process; the peers are threads of another process.
They send garbage, oversized and many frames, messages of all types with hostile values, and do not read what comes
back. Where the run is encrypted they try keys that were not admitted, no key, another server's key, and handshakes that
are half, slow or too large; their messages never arrive. Meanwhile a node that behaves is asked to answer heartbeats.
Nothing leaves loopback.
"""

import argparse
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq

from mlxdist.coordinator.cluster.cluster import Cluster
from mlxdist.coordinator.cluster.settings import ClusterSettings
from mlxdist.coordinator.fleet.access import Access
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.fleet.sockets import RouterHub
from mlxdist.keys.pair import new_pair
from mlxdist.keys.store import KeyStore
from mlxdist.protocol import messages as m
from mlxdist.protocol.transport import CONTROL, DATA
from mlxdist.protocol.wire import MAGIC, PREAMBLE, decode, encode

HERE = "127.0.0.1"
SESSION = m.SessionId("run", 1, "0" * 32)
SPEC = m.RunSpec("m", "sft", 0, 8, 8, 1.0, 0.0, "constant", ("q_proj",), -1, 0, 256)


def header(fields: dict[str, Any]) -> list[bytes]:
    """The frames of a message with these fields, unchecked."""
    return [PREAMBLE.pack(MAGIC, m.PROTOCOL_VERSION, 0, 0), msgspec.msgpack.encode(fields), b""]


def hostile(rng: random.Random) -> list[bytes]:
    """The frames of one hostile message."""
    session = [SESSION.run, SESSION.incarnation, SESSION.number]
    text = rng.choice(["x", "\x1b[2J", "é", "\n"]) * rng.choice([1, 300, 100_000, 3_000_000])
    match rng.randrange(9):
        case 0:
            return [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(1, 6))]
        case 1:
            return [bytes(1 << 20)] * 40
        case 2:
            return [bytes(rng.choice([1 << 16, (4 << 20) - 1]))] * 3
        case 3:
            return header({"type": "Register", "protocol": 1, "name": text, "worker": 0, "host": {}})
        case 4:
            facts = {"memory_bytes": "9" * rng.choice([20, 200, 5000]), "host": text[:200]}
            return header(
                {"type": "Register", "protocol": 1, "name": "n" + str(rng.random())[2:], "worker": 0, "host": facts}
            )
        case 5:
            return header({"type": "Log", "session": session, "lines": ["x"] * 1_000_000})
        case 6:
            return header({"type": text, "session": session, text: 1})
        case 7:
            return header({"type": "Leave", "session": [text, 2**63, "1"]})
        case _:
            return header({"type": "Heartbeat", "session": session, "worker_pid": 1})


def greeting(mechanism: bytes) -> bytes:
    """The 64 bytes with which a connection of ZeroMQ begins."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def knocks() -> list[bytes]:
    """Beginnings of connections: of other protocols, of half handshakes, and of one that announces 2 MB and more."""
    command = b"\x06" + (2 << 20).to_bytes(8, "big") + b"\x05HELLO" + bytes(1 << 20)
    hello = b"\x04\xc8\x05HELLO\x01\x00" + bytes(192)
    return [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"\xff",
        greeting(b"NULL"),
        greeting(b"CURVE"),
        greeting(b"CURVE") + hello,
        greeting(b"CURVE") + command,
        greeting(b"NULL") + command,
    ]


def stranger(context: "zmq.Context[Any]", rng: random.Random, server: bytes) -> "zmq.Socket[bytes]":
    """A socket that is never read. With the `server`'s key it tries a key of its own, another server, or none."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.RCVHWM, 1)
    dealer.setsockopt(zmq.SNDHWM, 8)
    dealer.setsockopt(zmq.SNDTIMEO, 500)
    if server and rng.randrange(4):
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
        dealer.setsockopt(zmq.CURVE_SERVERKEY, server if rng.randrange(3) else bytes(32))
    return dealer


def attack(ports: list[int], peers: int, seconds: float, server: bytes) -> None:
    """Sends hostile messages from `peers` connections that are never read, and opens half connections."""
    sent: Counter[str] = Counter()

    def one(number: int) -> None:
        rng, until = random.Random(number), time.monotonic() + seconds
        context = zmq.Context()
        halves: deque[socket.socket] = deque()
        while time.monotonic() < until:
            dealer = stranger(context, rng, server)
            dealer.connect(f"tcp://{HERE}:{ports[number % 2]}")
            for _ in range(4):
                halves.append(socket.create_connection((HERE, ports[rng.randrange(2)])))
                with suppress(OSError):
                    halves[-1].settimeout(0.5)
                    halves[-1].sendall(rng.choice(knocks()))
                sent["connections"] += 1
            while len(halves) > 16:
                halves.popleft().close()
            for _ in range(rng.choice([1, 20, 200])):
                try:
                    dealer.send_multipart(hostile(rng))
                    sent["messages"] += 1
                except zmq.Again:
                    sent["stuck"] += 1
                if time.monotonic() > until:
                    break
            dealer.close(0)
        for half in halves:
            half.close()
        context.term()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(peers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(dict(sent)))


def settled(process: psutil.Process) -> int:
    """The resident memory of a process in bytes."""
    return int(process.memory_info().rss)


def measure(peers: int, seconds: float, encrypted: bool = False) -> dict[str, Any]:
    """Runs the attack against a coordinator here, beside a supervisor that behaves, and returns what it cost."""
    access = Access(new_pair(), KeyStore(Path("none"))) if encrypted else None
    hub = RouterHub([HERE], 0, access)
    cluster = Cluster(ClusterSettings("run", 1, SPEC, {}, hub.ports[DATA]))
    fleet = Fleet(cluster, hub)
    here, context = psutil.Process(), zmq.Context()
    honest = context.socket(zmq.DEALER)
    if access is not None:
        keys = access.keys_for("honest")
        honest.curve_publickey, honest.curve_secretkey = bytes.fromhex(keys.public), bytes.fromhex(keys.secret)
        honest.curve_serverkey = bytes.fromhex(keys.coordinator)
    honest.connect(f"tcp://{HERE}:{hub.ports[CONTROL]}")
    honest.send_multipart(encode(m.Register(m.PROTOCOL_VERSION, "honest", 0, {})))
    accept, _ = decode(honest.recv_multipart())
    assert isinstance(accept, m.Accept)
    before, fds = settled(here), here.num_fds()
    ports = [hub.ports[CONTROL], hub.ports[DATA]]
    command = [sys.executable, __file__, "--attack", *map(str, ports), "--peers", str(peers)]
    command += ["--server", access.server.public if access is not None else "", "--seconds", str(seconds)]
    attacker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    most = most_fds = 0
    slowest = 0.0
    until, sent = time.monotonic() + seconds, Counter[str]()
    while True:
        if attacker.poll() is not None:  # libzmq aborts now and then where a message is cut in the middle
            assert attacker.stdout is not None
            sent.update(json.loads(attacker.stdout.read() or '{"aborted": 1}'))
            attacker.stdout.close()
            if until - time.monotonic() < 1:
                break
            command[-1] = str(until - time.monotonic())
            attacker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        began = time.monotonic()
        honest.send_multipart(encode(m.Heartbeat(accept.session, 0)))
        answered = honest.poll(10_000) and decode(honest.recv_multipart())[0]
        slowest = max(slowest, time.monotonic() - began)
        most, most_fds = max(most, settled(here)), max(most_fds, here.num_fds())
        if not isinstance(answered, m.HeartbeatAck):
            print(f"the honest node got {answered!r:.200}", file=sys.stderr)
        time.sleep(0.05)
    time.sleep(1.0)
    failure = cluster.failure
    result = {
        "peers": peers,
        "seconds": seconds,
        "encrypted": encrypted,
        "rss_before_mb": round(before / 1e6, 1),
        "rss_most_mb": round(most / 1e6, 1),
        "rss_after_mb": round(settled(here) / 1e6, 1),
        "fds_before": fds,
        "fds_most": most_fds,
        "fds_after": here.num_fds(),
        "slowest_heartbeat_seconds": round(slowest, 3),
        "refused": cluster.offenders.refused,
        "errors": cluster.offenders.errors,
        "first_error": repr(cluster.offenders.first_error),
        "nodes": len(cluster.nodes),
        "news": len(cluster.news),
        "failure": str(failure or ""),
        "honest_node": cluster.nodes["honest"].state.value,
        "sent": dict(sent),
    }
    fleet.close("the attack is over")
    honest.close(0)
    context.term()
    return result


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--peers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--encrypted", action="store_true")
    parser.add_argument("--server", default="", help=argparse.SUPPRESS)
    parser.add_argument("--attack", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        attack(options.attack, options.peers, min(options.seconds, 3600.0), bytes.fromhex(options.server))
    else:
        print(json.dumps(measure(options.peers, min(options.seconds, 3600.0), options.encrypted), indent=2))


if __name__ == "__main__":
    main()
