"""The notifier: notices wait in a short queue for a thread that posts them; the run never waits for the network."""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from mlxdist.coordinator.notify.address import Address
from mlxdist.coordinator.notify.notices import Notice, Notices
from mlxdist.coordinator.notify.post import post
from mlxdist.coordinator.report.format import count
from mlxdist.coordinator.report.sinks import Sink

MOST_WAITING = 8  # notices
END_SECONDS = 10.0  # for those that wait at the end of a run


class Notifier(Sink):
    """Posts the notices of a run named `run` to one address. A failure is told once, until a post succeeds."""

    def __init__(
        self,
        address: Address,
        run: str,
        *,
        send: Callable[[Address, str, Notice], str] = post,
        end_seconds: float = END_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address, self._run, self._send = address, run, send
        self._end_seconds, self._clock = end_seconds, clock
        self._notices = Notices()
        self._lock = threading.Lock()
        self._waiting: queue.Queue[Notice | None] = queue.Queue()
        self._queued, self._sent = 0, 0
        self._failure = ""  # the last one, while it lasts
        self._sentences: list[str] = []
        self._thread: threading.Thread | None = None

    def take(self, event: Mapping[str, Any]) -> Sequence[str]:
        """Queues the notice of an event, if it has one. Returns a new failure."""
        with self._lock:
            notice = self._notices.of(event, self._clock())
            if notice is not None:
                self._queue(notice)
            return self._said()

    def end(self, failure: str = "") -> Sequence[str]:
        """Waits `end_seconds` at most for the notices that are on their way."""
        with self._lock:
            if failure:
                self._queue(self._notices.failed(failure))
            thread = self._thread
            self._waiting.put(None)
        if thread is not None:
            thread.join(self._end_seconds)
        with self._lock:
            if left := self._queued - self._sent:
                self._sentences.append(f"notify: {left} of {count(self._queued, 'message')} were not sent")
            return self._said()

    def _queue(self, notice: Notice) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._post, name="notify", daemon=True)
            self._thread.start()
        if self._waiting.qsize() >= MOST_WAITING:
            with suppress(queue.Empty):
                self._waiting.get_nowait()  # an end counts more than what came before it
        self._queued += 1
        self._waiting.put(notice)

    def _post(self) -> None:
        while (notice := self._waiting.get()) is not None:
            failure = self._send(self._address, self._run, notice)
            with self._lock:
                if failure and not self._failure:
                    self._sentences.append(
                        f"notify: a message to {self._address.host} was not sent: {failure}. The run goes on"
                    )
                self._failure = failure
                self._sent += not failure

    def _said(self) -> list[str]:
        sentences, self._sentences = self._sentences, []
        return sentences
