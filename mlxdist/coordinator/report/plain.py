"""Plain lines for files, pipes and simple terminals: a line only when there is something new to say.

New is a sentence that a person should find again, another stage, a step whose turn it is, and work that takes unusually
long. A step has its turn every `report_every` steps, and whenever nothing was said for a time that grows with the run.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import TextIO

from mlxdist.coordinator.report.format import clock_phrase, duration_phrase, left_phrase, node_phrase
from mlxdist.coordinator.report.picture import Event, Picture, news_in, recalled

QUIET_SECONDS, MOST_QUIET_SECONDS = 15.0, 600.0  # without a line, after which a finished step is worth one
QUIET_SHARE = 0.05  # of the time since the start: an hour's run is silent for three minutes at most
LONG_SECONDS = 30.0  # of work without a line, after which it is said; then after twice as long, and so on
UNUSUAL = 3.0  # times as long as steps usually take
REMEMBERED = 32  # steps
COMING = ("connecting", "loading")  # states of a node on its way


class PlainDisplay:
    """Lines with the time in the run in front. `tick` is to be called often."""

    def __init__(self, stream: TextIO, *, report_every: int, clock: Callable[[], float]) -> None:
        self._stream, self._report_every, self._clock = stream, report_every, clock
        self._picture = Picture()
        self._began = self._seen = self._last_line = self._busy_since = clock()
        self._trains = False  # a step was told: the stages between steps are no news
        self._patience = LONG_SECONDS
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)  # of the last steps
        self._met: set[str] = set()  # the nodes of which something was told
        self._known: set[str] = set()  # those that were ready once
        self._ended = False
        self._lock = threading.RLock()

    def recall(self, events: Iterable[Event], now: float | None = None, shown: int = 0) -> None:
        """Takes events that were told before, in place of all that it has taken; see Display."""
        with self._lock:
            self._picture, again = recalled(self._remembered(events), shown)
            self._seen = self._clock() - self._picture.since(now)
            self._busy_since, self._patience = self._clock(), self._long()
            for seconds, sentence in again:
                self._write(seconds, sentence)

    def take(self, event: Event) -> None:
        """Tells an event if it is news."""
        with self._lock:
            before = self._picture.busy
            self._picture.take(event)
            self._seen = self._clock()
            changed = self._picture.busy != before
            sentence = self._sentence(event, changed)
            self._remember(event)
            self._trains = self._trains or event.get("event") == "train"
            if changed:
                self._busy_since, self._patience = self._seen, self._long()
            if sentence is not None:
                self.say(sentence)

    def stage(self, message: str, progress: float | None) -> None:
        """Tells a new stage at once; its progress comes with the lines of `tick`."""
        with self._lock:
            new = message != self._picture.busy
            self._picture.stage(message, progress)
            if new:
                self._busy_since, self._patience = self._clock(), self._long()
            if new and (self._picture.ending or not self._trains):
                self.say(message)

    def say(self, sentence: str) -> None:
        """Writes one line."""
        with self._lock:
            self._write(self._now(), sentence)

    def end(self, sentence: str) -> None:
        """Writes the closing line; `tick` writes nothing after it."""
        with self._lock:
            self.say(sentence)
            self._ended = True

    def tick(self) -> None:
        """Tells what the run is busy with when that takes unusually long: each time after twice as long."""
        with self._lock:
            long = self._clock() - self._busy_since
            if long < self._patience or self._ended or self._picture.ending:
                return
            self._patience = min(2 * self._patience, self._patience + MOST_QUIET_SECONDS)
            done = self._picture.busy_progress
            part = f" ({done:.0%})" if done is not None else ""
            usual = f", usually {duration_phrase(median(self._seconds))}" if self._in_a_step() else ""
            rows = () if self._trains else self._picture.nodes.items()
            coming = "".join(f"; {name}: {row.message or row.state}" for name, row in rows if row.state in COMING)
            self.say(f"… {self._picture.busy}{part}, {duration_phrase(long)} so far{usual}{coming}")

    def _sentence(self, event: Event, changed: bool) -> str | None:
        """Returns the line that an event is worth; it has `changed` what the run is busy with."""
        message = str(event.get("message") or "")
        match event.get("event"):
            case "done":
                return None  # the closing line says it
            case "train":
                left = left_phrase(self._picture.seconds_left)
                return f"{message}{left}" if self._is_due(event["step"]) else None
            case "stage" if changed and not self._trains and news_in(event) is None:
                return message
            case "node" if not event.get("stays") and self._comes_up(event):
                return node_phrase(str(event.get("name")), str(event.get("state")), message)
        return news_in(event)

    def _comes_up(self, event: Event) -> bool:
        """Says whether a node that was not ready yet is new, is refused, or joins a run that trains."""
        name, state = event.get("name"), event.get("state")
        if name in self._known or state == "busy":
            return False
        return self._trains if state == "ready" else name not in self._met or state not in COMING

    def _is_due(self, step: int) -> bool:
        if step % self._report_every == 0 or step in (1, self._picture.total_steps):
            return True
        now = self._clock()
        quiet = min(max(QUIET_SECONDS, QUIET_SHARE * (now - self._began)), MOST_QUIET_SECONDS)
        until_its_turn = (self._report_every - step % self._report_every) * median(self._seconds or [0.0])
        return now - self._last_line >= quiet and until_its_turn > quiet

    def _write(self, seconds: float, sentence: str) -> None:
        self._last_line = self._clock()
        self._stream.write(f"{clock_phrase(seconds)}  {sentence}\n")
        self._stream.flush()

    def _remembered(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            self._remember(event)
            yield event

    def _remember(self, event: Event) -> None:
        if event.get("event") == "node":
            self._met.add(str(event.get("name")))
            if event.get("state") == "ready":
                self._known.add(str(event.get("name")))
        if event.get("event") == "train":
            self._seconds.append(event.get("seconds") or 0.0)

    def _long(self) -> float:
        """The seconds of the present work after which it is unusually long."""
        return max(LONG_SECONDS, UNUSUAL * median(self._seconds)) if self._in_a_step() else LONG_SECONDS

    def _in_a_step(self) -> bool:
        return bool(self._seconds) and self._picture.busy.startswith("working on step")

    def _now(self) -> float:
        """The seconds of the run."""
        return self._picture.at + self._clock() - self._seen
