"""The picture of a run: what its events have told so far. Events in, values out; the terminal and `status` draw it.

A run that trains tells its events as they happen; one that is only watched is read from its `metrics.jsonl`. The
picture is the same, so an event may lack what an older mlxdist did not write.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

from rich.progress import Progress

from mlxdist.coordinator.report.eta import new_progress, seconds_left
from mlxdist.coordinator.report.format import node_phrase

Event = Mapping[str, Any]
ACCURACIES = "rewards/accuracies"
COMPUTED = ("leaf", "copy")  # kinds of rows in `work`


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node. The numbers are of the last step that told them; None: unknown."""

    state: str
    message: str = ""
    share: float | None = None  # of the leaves of a step that it computed, in [0, 1]
    tokens_per_second: float | None = None  # padding included
    peak_gb: float | None = None  # of mlx's memory
    swap_gb: float | None = None  # in use on its Mac
    heat: str = ""  # as macOS calls its thermal pressure: nominal, moderate …


@dataclass
class Picture:
    """The known facts of a run. Times are seconds of the run, as `wall_seconds` counts them."""

    at: float = 0.0  # when the last event was told
    time: str = ""  # the same by the wall clock of the run's host, ISO 8601
    busy: str = "starting"
    busy_since: float = 0.0
    busy_progress: float | None = None  # of what it is busy with, in [0, 1]
    last: Event | None = None  # the last step
    losses: list[float | None] = field(default_factory=list)  # of every step; None: not finite
    accuracies: list[float | None] = field(default_factory=list)  # of preferences
    vals: list[tuple[int, float | None]] = field(default_factory=list)  # step and loss of each evaluation
    best: tuple[int, float | None] | None = None  # of the evaluations, the one whose checkpoint is the best
    nodes: dict[str, NodeRow] = field(default_factory=dict)
    ending: Literal["", "done", "interrupted", "failed", "stopped"] = ""  # stopped: it was killed, without a word
    _next: str = "starting"  # what it does after an evaluation
    _steps: Progress = field(init=False)

    def __post_init__(self) -> None:
        self._steps = new_progress(lambda: self.at)

    @property
    def total_steps(self) -> int | None:
        """The length of the run in steps; None where it is not known, or only the time is limited."""
        return self.last["total_steps"] if self.last is not None and self.last.get("total_steps") else None

    @property
    def progress(self) -> float | None:
        """The share of the run that is done, in [0, 1]; before the first step, that of the stage."""
        return self.busy_progress if self.last is None else self.last.get("progress")

    @property
    def seconds_left(self) -> float | None:
        """The seconds to the end of the run, evaluations and saves included; None while not known."""
        if self.last is None or self.ending:
            return None
        if self.total_steps is not None:
            return seconds_left(self._steps)
        done, elapsed = self.last.get("progress"), self.last.get("elapsed_seconds")
        return elapsed * (1 - done) / done if done and elapsed else None  # train.max_hours

    def take(self, event: Event) -> None:
        """Adds one event."""
        self.at = max(self.at, event.get("wall_seconds") or 0.0)
        self.time = str(event.get("time") or self.time)
        if taker := _TAKERS.get(str(event.get("event"))):
            self.ending = ""  # a run that ended was resumed
            taker(self, event)

    def since(self, now: float | None) -> float:
        """Returns the seconds since the last event, by the clock of the run's host: none after the end of the run.

        `now`: seconds since 1970; None: not known.
        """
        return 0.0 if now is None or self.ending else age_of(self.time, now)

    def stage(self, message: str, progress: float | None) -> None:
        """Notes what the run is busy with from now on, and how far it is."""
        if message != self.busy:
            self.busy, self.busy_since = message, self.at
        self.busy_progress = progress

    def _stage(self, event: Event) -> None:
        if "paused" in event:
            self.stage("waiting for nodes" if event["paused"] else "working on the step", None)
        elif not event.get("note"):
            self.stage(str(event.get("message", "")), event.get("progress"))

    def _step(self, event: Event) -> None:
        number, total = event["step"], event.get("total_steps")
        if not self._steps.tasks:
            self._steps.add_task("", total=total)
        self._steps.update(self._steps.task_ids[-1], completed=number, total=total)
        self.last = event
        self.losses.append(event["loss"])
        if ACCURACIES in event:
            self.accuracies.append(event[ACCURACIES])
        self._next = "finishing" if number == total else f"working on step {number + 1}"
        self.stage(self._next, None)

    def _val(self, event: Event) -> None:
        self.vals.append((event["step"], event["loss"]))
        self.stage(self._next, None)

    def _checkpoint(self, event: Event) -> None:
        if event["best"]:
            self.best = next((val for val in reversed(self.vals) if val[0] == event["step"]), (event["step"], None))

    def _node(self, event: Event) -> None:
        name, state, message = (str(event.get(key) or "") for key in ("name", "state", "message"))
        before = self.nodes.get(name, NodeRow(state))
        self.nodes[name] = replace(before, state=state, message=message)

    def _work(self, event: Event) -> None:
        nodes = event.get("nodes") or {}
        leaves = {name: leaves_in(told.get("rows") or ()) for name, told in nodes.items()}
        for name, told in nodes.items():
            before = self.nodes.get(name, NodeRow(""))
            state = str(told.get("state") or before.state)
            if state == "ready" and leaves[name]:
                state = "busy"  # at the end of a step every node is ready; those that took part are told from spares
            self.nodes[name] = NodeRow(
                state,
                before.message if before.state == state else "",
                share=leaves[name] / (sum(leaves.values()) or 1),
                tokens_per_second=told.get("tokens_per_second"),
                peak_gb=told.get("peak_gb"),
                swap_gb=told.get("swap_gb"),
                heat=str(told.get("heat") or ""),
            )

    def _done(self, event: Event) -> None:
        status = event.get("status")
        self.ending = status if status in ("done", "interrupted", "stopped") else "failed"
        self.busy = ""
        for name, node in self.nodes.items():
            self.nodes[name] = replace(node, state="ready" if node.state == "busy" else node.state)


_TAKERS: Mapping[str, Callable[[Picture, Event], None]] = {
    "stage": Picture._stage,
    "train": Picture._step,
    "val": Picture._val,
    "checkpoint": Picture._checkpoint,
    "node": Picture._node,
    "work": Picture._work,
    "done": Picture._done,
}


def recalled(events: Iterable[Event], shown: int) -> tuple[Picture, list[tuple[float, str]]]:
    """Returns the picture of events that were told before, and their last sentences with their seconds in the run."""
    picture, news = Picture(), deque[tuple[float, str]](maxlen=shown)
    for event in events:
        picture.take(event)
        if (sentence := news_in(event)) is not None and event.get("event") != "done":
            news.append((picture.at, sentence))
    return picture, list(news)


def age_of(time: str, now: float) -> float:
    """Returns the seconds from a time of an event to `now`, seconds since 1970; 0 where the clocks do not agree."""
    try:
        return max(now - datetime.fromisoformat(time).timestamp(), 0.0)
    except ValueError:
        return 0.0


def leaves_in(rows: Iterable[Sequence[Any]]) -> int:
    """Returns the leaves that a node computed, by the rows of a `work` event."""
    return sum(stop - start for kind, _, _, start, stop in rows if kind in COMPUTED)


def news_in(event: Event) -> str | None:
    """Returns the sentence of an event that a person should find again; None for the daily work of a run."""
    message = str(event.get("message") or "")
    match event.get("event"):
        case "val" | "checkpoint" | "promise" | "done":
            return message
        case "stage" if event.get("note") or "paused" in event:
            return message
        case "node" if event.get("stays"):
            return node_phrase(str(event.get("name")), str(event.get("state")), message)
    return None
