"""The news of a node that stay on the screen: its loss, its return, and now and then a small trouble."""

from dataclasses import dataclass, field

from mlxdist.coordinator.cluster.events import NodeNews
from mlxdist.coordinator.report.node_states import WORKING, is_loss

QUIET_SECONDS, MOST_QUIET_SECONDS = 60.0, 3600.0  # after a node's small trouble was told: the first time, and at most


@dataclass(frozen=True, slots=True)
class Importance:
    """The weight of news. `trouble`: it disturbs the step in work; `stays`: it is told on the screen."""

    trouble: bool
    stays: bool


@dataclass
class NewsFilter:
    """Remembers what was told of which node."""

    _last: dict[str, tuple[str, str]] = field(default_factory=dict)  # state and message
    _missed: set[str] = field(default_factory=set)  # nodes whose loss was told, and not yet their return
    _quiet: dict[str, tuple[float, float]] = field(default_factory=dict)  # until when, and how long the next time

    def weigh(self, news: NodeNews, now: float) -> Importance | None:
        """Returns the importance of news at the monotonic time `now`; None for a repetition of the last ones."""
        name, state = news.name, news.state
        before = self._last.get(name, ("", ""))
        if before == (state, news.message):
            return None
        self._last[name] = (state, news.message)
        gone = is_loss(before[0], state)
        small = not gone and (state == "suspect" or bool(news.action))
        back = name in self._missed and state in WORKING
        stays = gone or back or (small and self._may_tell(name, now))
        if back:
            self._missed.discard(name)
        elif stays and state not in WORKING:
            self._missed.add(name)
        return Importance(gone or small, stays)

    def _may_tell(self, name: str, now: float) -> bool:
        """Says yes at ever longer intervals, so that a Mac at the edge of the Wi-Fi does not fill a night's log."""
        until, seconds = self._quiet.get(name, (now, QUIET_SECONDS))
        if now >= until:
            self._quiet[name] = (now + seconds, min(2 * seconds, MOST_QUIET_SECONDS))
        return now >= until
