"""The events that a person away from the screen is told of, in words, and how often. Pure: events in, notices out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from mlxdist.coordinator.report.format import count, duration_phrase

Kind = Literal["done", "interrupted", "failed", "paused", "node lost", "best"]
Priority = Literal["high", "default", "low"]

PRIORITIES: Mapping[Kind, Priority] = MappingProxyType({"failed": "high", "paused": "high", "best": "low"})
TAGS: Mapping[Kind, str] = MappingProxyType(  # the emoji short codes of ntfy
    {
        "done": "white_check_mark",
        "interrupted": "stop_sign",
        "failed": "rotating_light",
        "paused": "pause_button",
        "node lost": "warning",
        "best": "chart_with_downwards_trend",
    }
)
ENDS = ("done", "interrupted", "failed")  # are always told
QUIET_SECONDS = 600.0  # after a notice of the same kind about the same node
HOUR_SECONDS, MOST_IN_AN_HOUR = 3600.0, 12  # of all that are no ends
MOST_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class Notice:
    """One message to a person."""

    kind: Kind
    text: str
    about: str = ""  # a node

    @property
    def priority(self) -> Priority:
        """The urgency, as ntfy has it."""
        return PRIORITIES.get(self.kind, "default")

    @property
    def tag(self) -> str:
        """The symbol in front of the title, as ntfy names it."""
        return TAGS[self.kind]


@dataclass
class Notices:
    """Remembers what a notice needs of earlier events, and which notices were sent when."""

    _step: int = 0
    _total_steps: int | None = None
    _val: str = ""  # the last evaluation
    _best: str = ""  # the best one
    _quiet_until: dict[tuple[str, str], float] = field(default_factory=dict)
    _sent_at: list[float] = field(default_factory=list)
    _left_out: dict[tuple[str, str], int] = field(default_factory=dict)

    def of(self, event: Mapping[str, Any], now: float) -> Notice | None:
        """Returns the notice of an event at the monotonic time `now`; None where there is none, or too many were."""
        notice = self._notice(event)
        if notice is None or notice.kind in ENDS:
            return notice
        key = (notice.kind, notice.about)
        self._sent_at = [at for at in self._sent_at if now - at < HOUR_SECONDS]
        if now < self._quiet_until.get(key, now) or len(self._sent_at) >= MOST_IN_AN_HOUR:
            self._left_out[key] = self._left_out.get(key, 0) + 1
            return None
        self._sent_at.append(now)
        self._quiet_until[key] = now + QUIET_SECONDS
        more = self._left_out.pop(key, 0)
        since = f" ({count(more, 'message')} like this since the last one were left out)" if more else ""
        return Notice(notice.kind, notice.text + since, notice.about)

    def failed(self, reason: str) -> Notice:
        """Returns the notice of a run that could not go on, where no event tells it."""
        return Notice("failed", f"{self._where()}: {reason}"[:MOST_CHARACTERS])

    def _notice(self, event: Mapping[str, Any]) -> Notice | None:
        match event:
            case {"event": "train", "step": int(step)}:
                self._step, self._total_steps = step, event.get("total_steps")
            case {"event": "val", "step": step, "loss": loss}:
                value = f"{loss:.4f}" if isinstance(loss, float) else "not finite"
                self._val = f"validation loss {value} after step {step}"
            case {"event": "checkpoint", "best": True}:
                self._best = self._val
                return Notice("best", f"{self._val}, the best so far")
            case {"event": "stage", "paused": True, "message": message}:
                return Notice("paused", f"{self._where()}: {message}"[:MOST_CHARACTERS])
            case {"event": "node", "state": "dead" | "left", "name": name, "message": message} | {
                "event": "node",
                "state": "connecting",
                "stays": True,
                "name": name,
                "message": message,
            }:  # the second: its worker is gone, and is started again
                return Notice("node lost", f"{self._where()}: {name}: {message}"[:MOST_CHARACTERS], name)
            case {"event": "done", "status": "done" | "interrupted" | "failed" as status, "message": message}:
                if status == "failed":
                    return self.failed(message)
                return Notice(status, self._ended(event))
        return None

    def _where(self) -> str:
        total = f" of {self._total_steps}" if self._total_steps is not None else ""
        return f"after step {self._step}{total}" if self._step else "before the first step"

    def _ended(self, event: Mapping[str, Any]) -> str:
        parts = [self._where(), duration_phrase(event.get("wall_seconds") or 0.0)]
        parts += [f"best: {self._best}"] if self._best else []
        lost = event.get("seconds_lost") or 0.0
        parts += [f"{duration_phrase(lost)} lost to failures"] if lost >= 1 else []
        return "; ".join(parts)
