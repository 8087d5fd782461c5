"""Measures the link to the coordinator for `mlxdist doctor`: ports, round trip, clock, and both directions."""

import socket
import statistics
import struct
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

from mlxdist.keys.pair import NodeKeys
from mlxdist.node.link.addresses import join_endpoint
from mlxdist.node.link.sockets import DealerLink
from mlxdist.protocol.link_check import BLOCK, BLOCKS, DOWN, END, GO, PING, READY, UP
from mlxdist.protocol.transport import CONTROL, DATA, Link

CONNECT_SECONDS = 5.0
TURN_SECONDS = 120.0  # until the other hosts were measured
ANSWER_SECONDS = 30.0
PINGS = 20


class SilentError(Exception):
    """The coordinator did not answer on a connection that was made; the text names the channel."""


@dataclass
class Wire:
    """One connection, and what has arrived on it and was not read yet."""

    channel: str
    link: Link
    waiting: deque[list[bytes]] = field(default_factory=deque)

    def send(self, *frames: bytes) -> None:
        """Sends a message, once there is a connection. Raises SilentError."""
        until = time.monotonic() + CONNECT_SECONDS
        while not self.link.send(frames):
            if time.monotonic() > until:
                raise SilentError(self.channel)
            time.sleep(0.01)

    def receive(self, kind: bytes, timeout: float = ANSWER_SECONDS) -> list[bytes]:
        """Returns the next message of a kind, after up to `timeout` seconds. Raises SilentError."""
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            while self.waiting:
                frames = self.waiting.popleft()
                if frames[0] == kind:
                    return frames
            self.waiting.extend([bytes(frame) for frame in frames] for frames in self.link.receive(0.5))
        raise SilentError(self.channel)


def measure(host: str, ports: Mapping[str, int], keys: NodeKeys | None) -> dict[str, Any]:
    """Returns what the link to the coordinator is worth, or the port that is blocked.

    `round_trip` and `clock_offset` (this clock minus the coordinator's) are in seconds, `up` and `down` in bytes per
    second. `errno` is 0 where the connection was made and no answer came.
    """
    for port in ports.values():
        try:
            socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
        except OSError as error:
            return {"host": host, "blocked": port, "errno": error.errno or 0, "error": str(error)}
    wires = {
        name: Wire(name, DealerLink(join_endpoint(host, port), f"doctor/{token_hex(16)}".encode(), keys=keys))
        for name, port in ports.items()
    }
    try:
        return {"host": host, **_measured(wires[CONTROL], wires[DATA])}
    except SilentError as error:
        return {"host": host, "blocked": ports[str(error)], "errno": 0, "error": "no answer"}
    finally:
        for wire in wires.values():
            wire.link.close()


def _measured(control: Wire, data: Wire) -> dict[str, float]:
    control.send(READY)
    control.receive(GO, TURN_SECONDS)  # so that no other host shares the coordinator's cable
    trips, offsets = [], []
    for _ in range(PINGS):
        started, here = time.monotonic(), time.time()
        control.send(PING)
        (there,) = struct.unpack("<d", control.receive(PING)[1])
        trips.append(time.monotonic() - started)
        offsets.append(here + trips[-1] / 2 - there)
    data.send(PING)
    data.receive(PING)
    trip, block = statistics.median(trips), bytes(BLOCK)
    started = time.monotonic()
    for _ in range(BLOCKS):
        data.send(UP, block)
    data.send(END)
    data.receive(END)
    up = time.monotonic() - started
    started = time.monotonic()
    data.send(DOWN)
    for _ in range(BLOCKS):
        data.receive(DOWN)
    down = time.monotonic() - started
    control.send(END)
    size = BLOCK * BLOCKS
    return {
        "round_trip": trip,
        "up": size / max(up - trip, 1e-6),
        "down": size / max(down - trip, 1e-6),
        "clock_offset": offsets[trips.index(min(trips))],
    }
