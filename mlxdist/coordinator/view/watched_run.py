"""One run as its files tell it: curves, nodes, losses, checkpoints, and the place of each step's timeline."""

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxdist.coordinator.report.event_log import EventLog, Line, event_of
from mlxdist.coordinator.report.goodput import Redone, StepTime
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.coordinator.view.curve import Curve
from mlxdist.coordinator.view.troubles import Trouble, Troubles

MOST_LINES = 200  # of what the run said, the last ones
# Keys of a train event that are no curve.
NO_CURVE = frozenset(
    ["event", "time", "wall_seconds", "step", "total_steps", "progress", "message", "disturbed", "elapsed_seconds"]
)


@dataclass
class Told:
    """All that the event file has told so far."""

    curves: dict[str, Curve] = field(default_factory=dict)
    times: dict[int, StepTime] = field(default_factory=dict)  # by step
    ended: dict[int, float] = field(default_factory=dict)  # wall seconds at the end of each step
    pauses: dict[int, float] = field(default_factory=dict)  # seconds in evaluations, by step
    redone: Redone = field(default_factory=Redone)
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)  # the last that was told of each
    saved: dict[str, dict[str, Any]] = field(default_factory=dict)  # checkpoints by path
    troubles: Troubles = field(default_factory=Troubles)
    places: dict[int, tuple[int, int]] = field(default_factory=dict)  # of the work of each step: start, length
    said: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=MOST_LINES))  # wall seconds, sentence
    best: Mapping[str, Any] | None = None
    promise: str = ""
    paused: bool = False  # too few nodes can work
    status: str | None = None
    step: int = 0
    total_steps: int | None = None
    wall_seconds: float = 0.0

    def take(self, line: Line) -> None:
        """Takes one event. A line that lacks what its kind should have changes nothing."""
        event = line.event
        try:
            self._take(event, line)
        except (KeyError, TypeError, ValueError, AttributeError):
            return
        self.wall_seconds = float(event.get("wall_seconds") or self.wall_seconds)

    def _take(self, event: Mapping[str, Any], line: Line) -> None:
        wall = float(event.get("wall_seconds") or 0.0)
        if event["event"] != "done":
            self.status = None
        match event["event"]:
            case "train":
                self._step(event, wall)
            case "val":
                self._curve("val/loss").add(event["step"], event["loss"])
                for name, value in event["metrics"].items():
                    self._curve(f"val/{name}").add(event["step"], value)
                self.pauses[event["step"]] = event.get("seconds_paused") or 0.0
                self.troubles.evaluated(event["step"], self.pauses[event["step"]])
                self._say(wall, event)
            case "work":
                self.places[event["step"]] = (line.start, line.length)
                for name, work in event["nodes"].items():
                    self._curve(f"node/{name}/tokens_per_second").add(event["step"], work["tokens_per_second"] or None)
                    self._curve(f"node/{name}/peak_gb").add(event["step"], work["peak_gb"] or None)
            case "node":
                self.nodes[event["name"]] = dict(event)
                self.troubles.node(event, wall)
            case "checkpoint":
                self.saved[event["path"]] = dict(event)
                if event["best"]:
                    self.best = event
                self._say(wall, event)
            case "stage":
                self.paused = event.get("paused", self.paused)
                self.redone = Redone(
                    self.redone.steps + event.get("steps_again", 0),
                    self.redone.seconds + event.get("seconds_lost", 0.0),
                    self.redone.leaves + event.get("leaves_recomputed", 0),
                )
                self._say(wall, event)
            case "promise":
                self.promise = event["promise"]
                self._say(wall, event)
            case "done":
                self.status = event["status"]
                self._say(wall, event)

    def _step(self, event: Mapping[str, Any], wall: float) -> None:
        step, seconds = event["step"], event["seconds"]
        for name, value in event.items():
            if name not in NO_CURVE:
                self._curve(name).add(step, value)
        tokens = (event.get("all_tokens_per_second") or 0.0) * seconds
        time = StepTime(
            seconds,
            tokens,
            bool(event.get("disturbed")),
            event.get("leaves_recomputed") or 0,
            event.get("seconds_paused") or 0.0,
        )
        self.times[step], self.ended[step] = time, wall
        self.step, self.total_steps = step, event.get("total_steps")
        self.troubles.stepped(step)

    def _curve(self, name: str) -> Curve:
        found = self.curves.get(name)
        if found is None:
            found = self.curves[name] = Curve()
        return found

    def _say(self, wall: float, event: Mapping[str, Any]) -> None:
        self.said.append((wall, str(event["message"])))


@dataclass
class WatchedRun:
    """A run folder that is read again and again; it is never written to. Safe to call from several threads."""

    folder: RunFolder
    version: int = 0  # one higher for each change
    told: Told = field(default_factory=Told)
    _log: EventLog = field(init=False)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self._log = EventLog(self.folder.metrics_jsonl)

    def refresh(self) -> int:
        """Reads what was added. Returns the version, which changes when there was something. Raises OSError."""
        with self.lock:
            changed = False
            while any(news := self._log.news()):
                replaced, lines = news
                if replaced:
                    self.told = Told()
                for line in lines:
                    self.told.take(line)
                changed = True
            self.version += changed
            return self.version

    def work_of(self, step: int) -> dict[str, Any]:
        """Returns the work event of a step, read from the file; nothing where it has none."""
        start, length = self.told.places.get(step, (0, 0))
        try:
            with self.folder.metrics_jsonl.open("rb") as stream:
                stream.seek(start)
                event = event_of(stream.read(length))
        except OSError:
            return {}
        return event if event is not None and event.get("step") == step else {}

    def troubles_in(self, step: int) -> list[Trouble]:
        """Returns what happened to nodes in a step."""
        return [trouble for trouble in self.told.troubles.all if trouble.step == step]


def watched(path: Path) -> WatchedRun:
    """Returns the run in a folder, with nothing read yet."""
    return WatchedRun(RunFolder(path))
