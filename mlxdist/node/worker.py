"""The worker process: holds the model, computes, and talks to the coordinator's data port.

Two threads share a Session: the main one computes (mlx runs there alone), the other carries messages. Nothing waits
for the network inside an MLX graph: results are evaluated, then delivered. The supervisor starts this process and
writes one JSON line per session to its standard input; the end of standard input ends the process.

Every order is a new session with a connection of its own; the model stays. So a worker whose connection broke, whose
node was declared dead, or whose coordinator came back, starts again without loading anything.
"""

import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from mlxdist.node.link.jobs import FetchModel, Finish, LoadModel, Result, TakeBlock
from mlxdist.node.link.session import Session
from mlxdist.node.link.sockets import DealerLink
from mlxdist.node.process import HAS, HAS_ALL, TAKES, Order
from mlxdist.node.work.blas import use_openblas
from mlxdist.protocol import messages as m
from mlxdist.protocol.transport import Link
from mlxdist.protocol.versions import package_versions
from mlxdist.protocol.wire import Buffer, Frames, decode, encode, fitted

if TYPE_CHECKING:
    from mlxdist.node.work.engine import Engine

FLUSH_SECONDS = 5.0  # that the last messages may take to leave
HELLO_SECONDS = 2.0  # until a hello without an answer is said again: it may have been lost with its connection
MOST_HELLOS = 4  # on one connection; then it is replaced, as it may be dead without a sign


class Carrier:
    """Carries a session's messages over a link, in a thread of its own, until it is closed or `superseded`."""

    def __init__(self, session: Session, link: Link, superseded: Callable[[], bool] = lambda: False) -> None:
        self.session, self.link, self.superseded = session, link, superseded
        self.changed = threading.Condition()
        self.error: Exception | None = None
        self.unsent: deque[Frames] = deque()  # no connection yet
        self.hellos = 0  # on this connection
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="carrier", daemon=True)
        self._thread.start()

    def say(self, message: m.Message, payload: Buffer = b"") -> None:
        """Queues a message."""
        with self.changed:
            self.session.say(message, payload)
        self.link.wake()

    def deliver(self, result: Result) -> bool:
        """Queues a result of the job in work. Returns False when the rest of it is not needed any more."""
        with self.changed:
            needed = self.session.deliver(result)
        self.link.wake()
        return needed

    def progress(self, sentence: str) -> None:
        """Queues a sentence on what the job in work is doing."""
        self.say(m.Progress(self.session.id, sentence))

    def hello(self, message: m.Hello) -> None:
        """Says hello, unless the last one has not left yet."""
        if not self.unsent:
            self.hellos += 1
            self.say(message)

    def done(self) -> None:
        """Ends the job in work."""
        with self.changed:
            self.session.done()
        self.link.wake()

    def close(self) -> None:
        """Waits a while for queued messages to leave (not after a new order), then ends the thread."""
        deadline = time.monotonic() + FLUSH_SECONDS
        with self.changed:
            if self.superseded():
                self.session.end()
            while self.session.uploading and self.error is None and time.monotonic() < deadline:
                self.changed.wait(0.1)
        self._closing = True
        self.link.wake()
        self._thread.join()
        self.link.close()

    def _run(self) -> None:
        try:
            while not self._closing:
                for frames in self.link.receive(0.1 if self.unsent else 0.5):
                    message, payload = decode(frames)
                    with self.changed:
                        self.session.handle(message, payload)
                    self._send()  # the credit for a block leaves before the next block is looked at
                if self.superseded():
                    with self.changed:
                        self.session.end()  # the job in work is not needed either
                if self.hellos > MOST_HELLOS and self.session.spec is None:
                    self.hellos = 0
                    self.link.renew()
                self._send()
        except Exception as error:  # handed to the main thread, which raises it
            self.error = error
            with self.changed:
                self.changed.notify_all()

    def _send(self) -> None:
        """Sends what there is, one message at a time: a block travels while the next one is hashed."""
        outgoing = self.session.take_outgoing()
        while True:
            with self.changed:
                message = next(outgoing, None)
                if message is None:
                    self.changed.notify_all()
            if message is not None:
                self.unsent.append(encode(fitted(message[0]), message[1]))
            while self.unsent and self.link.send(self.unsent[0]):
                self.unsent.popleft()
            if message is None:
                return


def connected(order: Order) -> Link:
    """Opens a data connection for this session alone."""
    identity = f"{order.name}#{order.session.number}"  # which no stranger can take over: the number is random
    return DealerLink(order.endpoint, identity.encode(), probe=True, keys=order.keys)


def serve(
    order: Order, orders: "queue.Queue[Order]", engine: "Engine", connect: Callable[[Order], Link] = connected
) -> Finish | None:
    """Works for one session until the coordinator shuts down or rejects (returns that) or a new order comes (None)."""
    session = Session(order.name, order.session)
    carrier = Carrier(session, connect(order), superseded=lambda: not orders.empty())
    hello = m.Hello(order.session, package_versions())
    try:
        said = time.monotonic()
        carrier.hello(hello)
        while True:
            with carrier.changed:
                if not session.jobs and carrier.error is None and orders.empty():
                    carrier.changed.wait(0.5)
                if not orders.empty():
                    return None
                if carrier.error is not None:
                    raise carrier.error
                job = session.next_job() if session.jobs else None
            if job is None:
                if session.spec is None and time.monotonic() - said > HELLO_SECONDS:
                    said = time.monotonic()
                    carrier.hello(hello)
                continue
            if isinstance(job, Finish):
                return job
            if isinstance(job, LoadModel) and order.model:
                job = LoadModel(msgspec.structs.replace(job.spec, model=order.model))
            with closing(engine.perform(job, session.id, carrier.progress)) as results:
                for result in results:
                    if not carrier.deliver(result):
                        break
            carrier.done()
            if isinstance(job, FetchModel | TakeBlock):
                fetch = engine.locator.fetch
                print(f"{HAS}{fetch.have} of {fetch.size}" if fetch is not None else HAS_ALL, flush=True)
    finally:
        carrier.close()


def _read_orders(orders: "queue.Queue[Order]") -> None:
    for line in sys.stdin:
        orders.put(msgspec.json.decode(line, type=Order))
    os._exit(0)  # the supervisor is gone; nothing here is worth keeping


def main() -> None:
    """Works with the model of each run."""
    use_openblas()
    from mlxdist.node.work.engine import Engine

    work(Engine())


def work(engine: "Engine") -> None:
    """Serves one session after another, as standard input orders."""
    from mlxdist.node.work.limits import memory_limits

    orders: queue.Queue[Order] = queue.Queue()
    threading.Thread(target=_read_orders, args=(orders,), name="orders", daemon=True).start()
    for number in count(1):
        order = orders.get()
        print(f"{TAKES}{number}", flush=True)
        if order.models:
            engine.locator.models = Path.home() / Path(order.models).expanduser()
        with memory_limits(order.memory_limit_bytes):
            finish = serve(order, orders, engine)
        if finish is not None and finish.refused:
            sys.exit(f"refused: {finish.reason}")


if __name__ == "__main__":
    main()
