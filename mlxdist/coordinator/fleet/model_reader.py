"""A thread of its own for the model's files, so that neither hashing them nor a slow disk delays a message."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from mlxdist.coordinator.cluster.model_transfer import Answer, Reading
from mlxdist.coordinator.fleet.model_source import ModelSource


class ModelReader:
    """Reads what is asked, in order. `wake` ends the wait of who takes the answers."""

    def __init__(self, source: ModelSource, wake: Callable[[], None], *, threaded: bool = True) -> None:
        self._source, self._wake = source, wake
        self._asked: queue.SimpleQueue[Reading | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, name="model", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    def ask(self, readings: Iterable[Reading]) -> None:
        """Asks for readings; without a thread they are done at once."""
        for asked in readings:
            self._asked.put(asked)
        if self._thread is None:
            self._asked.put(None)
            self._read()

    def answers(self) -> Iterator[Answer]:
        """Yields the answers that are there."""
        with suppress(queue.Empty):
            while True:
                yield self._answers.get_nowait()

    def close(self) -> None:
        """Ends the thread, after the reading that it does."""
        with suppress(queue.Empty):
            while True:
                self._asked.get_nowait()
        self._asked.put(None)

    def _read(self) -> None:
        while (asked := self._asked.get()) is not None:
            self._answers.put(self._source.answer(asked))
            self._wake()
