"""A run shown on a display by one look after another, until it ends: what `status --watch` and `launch --attach` do."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from mlxdist.coordinator.overview.find import CLOCK_SECONDS
from mlxdist.coordinator.report.display import Display
from mlxdist.coordinator.report.format import duration_phrase, lost_time_phrase
from mlxdist.coordinator.report.goodput import LostTime
from mlxdist.coordinator.report.picture import age_of
from mlxdist.coordinator.status.looks import Look, Watched

SHOWN = 8  # sentences of before, when the watching begins
STOPPED = (
    "the run ended without a word: it was killed, or its Mac was restarted. mlxdist launch --resume goes on after its "
    "last saved step. Its last event is {age} old"
)
ELSEWHERE = "the run's coordinator is on another Mac: from here its files are seen, and not if it is still there"
NOTHING_SEEN = Look((), whole=True, held=None, begun=0.0, now=0.0)


@dataclass
class Watch:
    """The last event of a run, and the last look at it."""

    last: Mapping[str, Any] | None = None
    look: Look = NOTHING_SEEN

    def noted(self, look: Look) -> Iterator[Mapping[str, Any]]:
        """Yields the events of a look, and notes the last one."""
        for event in look.events:
            self.last = event
            yield event

    @property
    def told(self) -> Mapping[str, Any] | None:
        """The event with which the run has told its end; None where it has not, or was resumed since."""
        return self.last if self.last is not None and self.last.get("event") == "done" else None

    @property
    def over(self) -> bool:
        """True if nothing more can come: its coordinator is gone, or has told the end."""
        if self.look.held is False or self.told is None:
            return self.look.held is False
        ended = self.look.now - age_of(str(self.told.get("time")), self.look.now)
        resumed = self.look.held is True and self.look.begun > ended + CLOCK_SECONDS
        return not resumed  # else the end is that of the session before


def show(run: Watched, display: Display, *, watch: bool) -> Watch:
    """Shows a run as it is, and with `watch` on until it ends; an end that it has told is closed with its sentence.

    Returns what was seen. Raises what a look raises.
    """
    seen, first = Watch(), True
    while first or (watch and not seen.over):
        look = run.look()
        if first or look.whole:
            display.recall(seen.noted(look), look.now, SHOWN if first else 0)
        else:
            tell(seen.noted(look), display)
        seen.look = look
        if first and look.held is None and seen.told is None:
            display.say(ELSEWHERE)
        first = False
    if seen.told is not None:
        close(seen.told, display)
    return seen


def show_to_the_end(run: Watched, display: Display) -> None:
    """Shows a run until it ends, also without a word. Raises what a look raises."""
    seen = show(run, display, watch=True)
    if seen.told is None:
        say_stopped(seen, display)


def say_stopped(seen: Watch, display: Display) -> None:
    """Tells the end of a run that has told none."""
    display.take({"event": "done", "status": "stopped"})
    age = age_of(str((seen.last or {}).get("time")), seen.look.now)
    display.end(STOPPED.format(age=duration_phrase(age)))


def tell(events: Iterable[Mapping[str, Any]], display: Display) -> None:
    """Tells events to a display."""
    for event in events:
        display.take(event)


def close(done: Mapping[str, Any], display: Display) -> None:
    """Tells the end of a run by its last event."""
    keys = [each.name for each in fields(LostTime)]
    if done.get("step") and all(key in done for key in keys):
        display.say(lost_time_phrase(LostTime(**{key: done[key] for key in keys})))
    display.end(str(done.get("message") or "the run has ended"))
