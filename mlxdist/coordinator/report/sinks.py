"""Receivers of a run's events beside the event file and the display: loggers and notifications."""

from collections.abc import Mapping, Sequence
from typing import Protocol


class Sink(Protocol):
    """Receives each event of a run. It never waits in `take`, never raises, and may be called from several threads."""

    def take(self, event: Mapping[str, object]) -> Sequence[str]:
        """Takes an event, as `metrics.jsonl` has it. Returns sentences that a person should read, each once."""

    def end(self, failure: str = "") -> Sequence[str]:
        """Waits a bounded time for what is still on its way, and returns the last sentences.

        `failure`: the reason why the run could not go on, where no event has told it.
        """
