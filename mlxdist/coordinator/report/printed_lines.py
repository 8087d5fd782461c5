"""The lines of nodes that are shown: a few of each at a time, all others are counted and stand in its log."""

from dataclasses import dataclass, field

MOST_LINES = 8  # of a node, within PERIOD_SECONDS
PERIOD_SECONDS = 20.0


@dataclass
class PrintedLines:
    """Remembers how much of each node was shown lately."""

    _since: dict[str, float] = field(default_factory=dict)
    _shown: dict[str, int] = field(default_factory=dict)
    _hidden: dict[str, int] = field(default_factory=dict)

    def shown(self, name: str, line: str, now: float) -> list[str]:
        """Returns what to show for a line that node `name` printed at the monotonic time `now`: nothing, or lines."""
        if now - self._since.get(name, now - PERIOD_SECONDS) >= PERIOD_SECONDS:
            self._since[name], self._shown[name] = now, 0
        if self._shown[name] >= MOST_LINES:
            self._hidden[name] = self._hidden.get(name, 0) + 1
            return []
        self._shown[name] += 1
        hidden = self._hidden.pop(name, 0)
        left_out = [f"{name} | … {hidden:,} more lines in logs/{name}.log"] if hidden else []
        return [*left_out, f"{name} | {line}"]
