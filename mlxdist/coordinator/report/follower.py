"""The program that calls a run: it hears each event, may ask the run to stop, and chooses where the run is shown."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TextIO


@dataclass(frozen=True)
class Follower:
    """A program that follows a run; by default it follows nothing, and the run is shown on the standard output.

    `listen` gets every event as `metrics.jsonl` has it. `wants_stop` is asked after each step: the run then ends as by
    Ctrl-C, after a save.
    """

    listen: Callable[[Mapping[str, Any]], None] = lambda event: None
    wants_stop: Callable[[], bool] = lambda: False
    stream: TextIO | None = None  # None: the standard output
