"""The event file read back: what a resumed run needs of its earlier sessions, without the steps that it does again."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from mlxdist.coordinator.report.event_log import event_of
from mlxdist.coordinator.report.goodput import Redone, StepTime
from mlxdist.coordinator.storage.run_folder import write_aside

KEYS = MappingProxyType(
    {"train": {"step", "loss"}, "val": {"step", "loss", "metrics"}, "checkpoint": {"step", "best", "path"}}
)


@dataclass(frozen=True, slots=True)
class BestVal:
    """The best evaluation: its step, its loss (None: not finite), its checkpoint relative to the run folder."""

    step: int
    loss: float | None
    checkpoint: str | None


@dataclass(frozen=True, slots=True)
class History:
    """The facts that earlier sessions of a run have told; empty for a fresh one. A value is None if not finite."""

    train_losses: Mapping[int, float | None] = field(default_factory=dict)  # by step
    vals: Mapping[int, Mapping[str, float | None]] = field(default_factory=dict)  # by step: loss and metrics
    best: BestVal | None = None
    wall_seconds: float = 0.0
    peak_gb: float | None = None
    step_times: Mapping[int, StepTime] = field(default_factory=dict)  # by step
    redone: Redone = field(default_factory=Redone)
    pauses: Mapping[int, float] = field(default_factory=dict)  # seconds in evaluations, by step
    elapsed: Mapping[int, float] = field(default_factory=dict)  # seconds of training up to the end of a step, by step
    total_steps: int | None = None
    status: str | None = None  # of the end, where that is the last event


def read_history(path: Path) -> History:
    """Returns the facts in `metrics.jsonl`; an empty history where there is no such file."""
    train: dict[int, float | None] = {}
    vals: dict[int, dict[str, float | None]] = {}
    best: BestVal | None = None
    times: dict[int, StepTime] = {}
    pauses: dict[int, float] = {}
    elapsed: dict[int, float] = {}
    wall, peak, redone = 0.0, None, Redone()
    total, status = None, None
    for _, event in events(path):
        wall = max(wall, event.get("wall_seconds") or 0.0)
        kind, step = event.get("event"), event.get("step", 0)
        status = event.get("status") if kind == "done" else None
        if kind == "train":
            train[step] = event["loss"]
            times[step] = _step_time(event)
            total = event.get("total_steps")
            if event.get("elapsed_seconds") is not None:
                elapsed[step] = event["elapsed_seconds"]
            gb = event.get("peak_gb")
            peak = gb if peak is None else max(peak, gb or 0.0)
        elif kind == "val":
            vals[step] = {"loss": event["loss"], **event["metrics"]}
            pauses[step] = event.get("seconds_paused", 0.0)
        elif kind == "checkpoint" and event["best"]:
            best = BestVal(step, vals.get(step, {}).get("loss"), event["path"])
        elif kind == "stage" and "steps_again" in event:
            redone = Redone(
                redone.steps + event["steps_again"],
                redone.seconds + event.get("seconds_lost", 0.0),
                redone.leaves + event.get("leaves_recomputed", 0),
            )
    return History(train, vals, best, wall, peak, times, redone, pauses, elapsed, total, status)


def _step_time(event: Mapping[str, Any]) -> StepTime:
    seconds = event.get("seconds") or 0.0
    return StepTime(
        seconds,
        (event.get("all_tokens_per_second") or 0.0) * seconds,
        event.get("disturbed", False),
        event.get("leaves_recomputed", 0),
        event.get("seconds_paused", 0.0),
    )


def trim_metrics(path: Path, last_step: int) -> None:
    """Cuts `metrics.jsonl` back to a resumed run's last saved step, so that no step is told twice.

    Removes events of later steps, the end of an earlier session and a line that a crash tore. Events without a step
    (stages, nodes) stay.

    Raises:
        SaveError: it could not be written; the old file is kept.
    """
    if not path.exists():
        return

    def kept(stream: BinaryIO) -> None:
        for line, event in events(path):
            if event.get("event") != "done" and event.get("step", 0) <= last_step:
                stream.write(line + b"\n")

    write_aside(path, kept)


def events(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields each whole line with its event; torn lines, and those that lack a key of their event, are passed over."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            if (event := event_of(line)) is not None and is_whole(event):
                yield line.rstrip(b"\n"), event


def is_whole(event: Mapping[str, Any]) -> bool:
    """Returns true where an event has the keys of its kind without which it says nothing."""
    return KEYS.get(str(event.get("event")), frozenset()) <= event.keys()
