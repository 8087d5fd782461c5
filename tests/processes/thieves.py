"""Strangers on loopback that know everything a node has sent, and try to speak for it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import zmq

from mlxdist.protocol import messages as m
from mlxdist.protocol.vectors import digest
from mlxdist.protocol.wire import Frames, decode, encode
from tests.faults.fault_proxy import DOWN, UP, Proxy, Seen
from tests.processes.thread_nodes import HERE


@dataclass
class Wiretap:
    """All that a node behind a proxy has said and heard, and connections that repeat or forge it.

    `ports` are the coordinator's, by channel.
    """

    proxy: Proxy
    ports: dict[str, int]
    frames: list[Frames] = field(default_factory=list)  # sent by the node, in order
    answers: list[m.Message] = field(default_factory=list)  # to the thief
    context: "zmq.Context[Any]" = field(default_factory=zmq.Context)

    def listen(self) -> "Wiretap":
        """Records from now on what the node sends."""

        def keep(seen: Seen) -> None:
            self.frames.append(encode(seen.message, seen.payload))

        self.proxy.when(UP, lambda message: True, keep, once=False)
        return self

    @property
    def session(self) -> m.SessionId:
        """The node's session, as the wire shows it."""
        return self.proxy.saw(DOWN, m.Accept)[-1].session

    def connect(self, channel: str, identity: bytes) -> "zmq.Socket[bytes]":
        """Opens a connection under a name."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.IDENTITY, identity)
        dealer.connect(f"tcp://{HERE}:{self.ports[channel]}")
        return dealer

    def say(self, channel: str, identity: bytes, *messages: Frames) -> None:
        """Sends messages under a name, and hears what comes back for a moment."""
        dealer = self.connect(channel, identity)
        for frames in messages:
            dealer.send_multipart(frames)
        while dealer.poll(300):
            self.answers.append(decode(dealer.recv_multipart())[0])
        dealer.close(0)

    def forgeries(self) -> list[Frames]:
        """Messages in the node's newest session that would end it, or put wrong numbers into the sum."""
        session = self.session
        forged: list[Frames] = [
            encode(m.Leave(session)),
            encode(m.WorkerExit(session, "forged", ())),
            encode(m.Heartbeat(session, 0)),
            encode(m.Heartbeat(session, 999_999)),
            encode(m.Fault(session, "error", "forged")),
            encode(m.Pong(session)),
            encode(m.Hello(session, {})),
            encode(m.CanaryAnswer(session, ("forged",) * 3)),
        ]
        for task in self.proxy.saw(DOWN, m.Assignment)[-2:]:
            forged += self._wrong_numbers(msgspec.structs.replace(task, session=session))
        return forged

    def _wrong_numbers(self, task: m.Assignment) -> list[Frames]:
        elements = self.proxy.saw(DOWN, m.VectorOffer)[0].elements
        wrong = np.full(elements, np.float32(1e6))
        offer = m.VectorOffer(
            session=task.session,
            stream=1,
            kind="partial",
            adapter_version=task.adapter_version,
            elements=elements,
            step=task.step,
            attempt=task.attempt,
            start=task.start,
            stop=task.stop,
            slice_stop=elements,
        )
        answers = [
            encode(
                m.LeafAnswer(task.session, task.step, task.attempt, task.adapter_version, leaf, 1, 0.0, 0),
                np.float32([1e6]).tobytes(),
            )
            for leaf in range(task.start, task.stop)
        ]
        blocks = [encode(m.VectorBlock(task.session, 1, 0), wrong[: 1 << 18].tobytes())]
        return [encode(offer), *answers, *blocks, encode(m.VectorEnd(task.session, 1, digest(wrong)))]

    def close(self) -> None:
        """Ends all connections."""
        self.context.term()


class Repeated:
    """A thread that does something again and again until the block ends, once at least."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act, self.times = act, 0
        self.errors: list[BaseException] = []
        self._ended, self._once = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self.act()
                self.times += 1
                self._once.set()
        except BaseException as error:  # the test reads it
            self.errors.append(error)
            self._once.set()

    def __enter__(self) -> "Repeated":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._once.wait(60)
        self._ended.set()
        self._thread.join(60)
        assert not self.errors, self.errors
