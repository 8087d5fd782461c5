"""The coordinator's part of the link check: both ports of a run, one node at a time."""

import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from mlxdist.coordinator.fleet.access import Access
from mlxdist.coordinator.fleet.sockets import RouterHub
from mlxdist.protocol.link_check import BLOCK, BLOCKS, DOWN, END, EVERY, GO, PING, READY
from mlxdist.protocol.transport import CONTROL, Hub, Parcel

TURN_SECONDS = 20.0  # for a node whose turn it is and that says nothing any more
POLL_SECONDS = 0.2


@contextmanager
def link_answers(addresses: Sequence[str], port: int, access: Access) -> Iterator[Mapping[str, int]]:
    """Answers the link checks of nodes for a block, encrypted as a run is; yields the ports by channel.

    Raises ConfigError for a port that is in use.
    """
    hub, closing = RouterHub(addresses, port, access), threading.Event()
    thread = threading.Thread(target=_answer, args=(hub, closing), name="doctor", daemon=True)
    thread.start()
    try:
        yield hub.ports
    finally:
        closing.set()
        hub.wake()
        thread.join()
        hub.close()


def _answer(hub: Hub, closing: threading.Event) -> None:
    waiting: deque[bytes] = deque()
    turn, heard = b"", time.monotonic()
    block = bytes(BLOCK)
    while not closing.is_set():
        for parcel in hub.receive(POLL_SECONDS):
            channel, peer, frames = parcel.channel, parcel.peer, parcel.frames
            hub.admitted(parcel.waiting)
            kind = bytes(frames[0]) if frames and len(frames[0]) < BLOCK else b""
            if kind not in EVERY:
                continue
            heard = time.monotonic()
            if kind == READY:
                waiting.append(peer)
            elif kind == PING:
                hub.send(Parcel(channel, peer, [PING, struct.pack("<d", time.time())]))
            elif kind == DOWN:
                for _ in range(BLOCKS):
                    hub.send(Parcel(channel, peer, [DOWN, block]))
            elif kind == END and channel == CONTROL:
                turn = b"" if peer == turn else turn
            elif kind == END:
                hub.send(Parcel(channel, peer, [END]))
        if waiting and (not turn or time.monotonic() - heard > TURN_SECONDS):
            turn, heard = waiting.popleft(), time.monotonic()
            hub.send(Parcel(CONTROL, turn, [GO]))
