"""The facts of one run for its report, from its files alone; a run that is training is only read."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxdist.coordinator.config.keys import flat, hints
from mlxdist.coordinator.html_report.chart import Point
from mlxdist.coordinator.html_report.private import Private
from mlxdist.coordinator.overview.find import FoundRun, run_in, saved_settings
from mlxdist.coordinator.report.goodput import LostTime, lost_seconds, lost_time
from mlxdist.coordinator.report.history import events
from mlxdist.coordinator.report.node_states import LOST, TROUBLE, is_loss
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.coordinator.storage.saved_adapters import SavedAdapter, all_adapters
from mlxdist.protocol.errors import UserError

COMPUTED = ("leaf", "copy")  # rows of a node's work that are leaves of a step


@dataclass(frozen=True)
class Told:
    """An event that a reader of the report should find."""

    wall_seconds: float
    kind: str  # start, node lost, trouble, back, pause, promise, best, again or end
    text: str


@dataclass(frozen=True)
class Trouble:
    """A step in which nodes were lost, silent or slow."""

    step: int
    nodes: Sequence[str]
    seconds_lost: float
    leaves_recomputed: int


@dataclass
class NodeFacts:
    """One node over the run."""

    name: str
    state: str = ""
    losses: int = 0  # times that it was lost
    leaves_moved: int = 0  # that others computed in its place
    seconds_lost: float = 0.0  # in steps that it disturbed
    rates: list[float] = field(default_factory=list)  # tokens per second, in the steps whose work was told
    leaves: int = 0  # that it computed in them
    share: float | None = None  # of the leaves of these steps; None where no work was told


@dataclass(frozen=True)
class RunFacts:
    """All that the report shows of a run."""

    found: FoundRun
    name: str
    settings: Mapping[str, Any]  # by dotted key, without private parts
    series: Mapping[str, Sequence[Point]]  # of the steps, by name
    vals: Mapping[str, Sequence[Point]]  # of the evaluations, by name
    troubles: Sequence[Trouble]
    nodes: Sequence[NodeFacts]
    told: Sequence[Told]
    adapters: Sequence[SavedAdapter]
    lost: LostTime

    @property
    def total_steps(self) -> int | None:
        """The steps that the run is to take, where they are known."""
        return self.found.history.total_steps or self.settings.get("train.steps")


def gather(path: Path) -> RunFacts:
    """Returns the facts of the run in a folder. Raises UserError where there is none."""
    found = run_in(path)
    if found is None:
        raise UserError(f"{path} holds no run; mlxdist runs FOLDER lists those below a folder")
    run = RunFolder(path)
    saved = {key: value for key, value in flat(saved_settings(found)) if key in hints()}
    folders = [Path(value) for value in saved.values() if isinstance(value, str) and value.startswith("/")]
    private = Private([path, Path.home(), *folders])
    told = [event for _, event in events(run.metrics_jsonl)]
    steps = [event for event in told if event["event"] == "train"]
    history = found.history
    times = [history.step_times[step] for step in sorted(history.step_times)]
    costs = dict(zip(sorted(history.step_times), lost_seconds(times), strict=True))
    troubles = list(troubles_of(told, costs))
    return RunFacts(
        found=found,
        name=path.name,
        settings={key: private.value(value) for key, value in saved.items()},
        series=_series(steps),
        vals=_series([{**event["metrics"], **event} for event in told if event["event"] == "val"]),
        troubles=[trouble for trouble in troubles if trouble.nodes or trouble.seconds_lost],
        nodes=nodes_of(told, troubles),
        told=list(shown_events(told, private)),
        adapters=all_adapters(run),
        lost=lost_time(times, history.redone, sum(history.pauses.values()), history.wall_seconds),
    )


def _series(events: Sequence[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """Returns the finite numbers of events by their key, each with its step; a step that comes twice counts once."""
    by_step = {event["step"]: event for event in events}
    series: dict[str, list[Point]] = {}
    for step in sorted(by_step):
        for name, value in by_step[step].items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                series.setdefault(name, []).append((step, value))
    return series


def troubles_of(told: Sequence[Mapping[str, Any]], costs: Mapping[int, float]) -> Iterator[Trouble]:
    """Yields the steps that were disturbed, with the nodes that were in trouble since the step before."""
    nodes: list[str] = []
    for event in told:
        if event["event"] == "node" and (event["state"] in TROUBLE or event.get("leaves")):
            nodes.append(event["name"])
        elif event["event"] == "train":
            if event.get("disturbed"):
                step, again = event["step"], event.get("leaves_recomputed", 0)
                yield Trouble(step, tuple(dict.fromkeys(nodes)), costs.get(step, 0.0), again)
            nodes = []


def nodes_of(told: Sequence[Mapping[str, Any]], troubles: Sequence[Trouble]) -> list[NodeFacts]:
    """Returns the nodes by name. The seconds of a step that several of them disturbed count for each."""
    nodes: dict[str, NodeFacts] = {}
    for event in told:
        if event["event"] == "node":
            node = nodes.setdefault(event["name"], NodeFacts(event["name"]))
            before, node.state = node.state, event["state"]
            node.losses += is_loss(before, node.state) and before not in LOST
            node.leaves_moved += sum(stop - start for start, stop in event.get("leaves", ()))
        elif event["event"] == "work":
            for name, work in event.get("nodes", {}).items():
                node = nodes.setdefault(name, NodeFacts(name))
                node.rates += [work["tokens_per_second"]] if work.get("tokens_per_second") else []
                node.leaves += sum(stop - start for kind, *_, start, stop in work.get("rows", ()) if kind in COMPUTED)
    for trouble in troubles:
        for name in trouble.nodes:
            nodes[name].seconds_lost += trouble.seconds_lost
    total = sum(node.leaves for node in nodes.values())
    for node in nodes.values():
        node.share = node.leaves / total if total else None
    return [nodes[name] for name in sorted(nodes)]


def shown_events(told: Sequence[Mapping[str, Any]], private: Private) -> Iterator[Told]:
    """Yields the events that matter to somebody who was not there."""
    missed: set[str] = set()
    for event in told:
        kind, text = "", str(event.get("message") or "")
        match event:
            case {"event": "node", "state": "dead" | "left", "name": name}:
                kind, text = "node lost", f"{name}: {text}"
                missed.add(name)
            case {"event": "node", "leaves": [_, *_], "name": name} | {
                "event": "node",
                "state": "connecting" | "suspect",
                "stays": True,
                "name": name,
            }:
                kind, text = "trouble", f"{name}: {text}"
                missed.add(name)
            case {"event": "node", "state": "ready" | "busy", "name": name} if name in missed:
                kind, text = "back", f"{name} is back"
                missed.discard(name)
            case {"event": "stage", "paused": bool()}:
                kind = "pause"
            case {"event": "stage", "steps_again": int()}:
                kind = "again"
            case {"event": "promise"}:
                kind = "promise"
            case {"event": "checkpoint", "best": True}:
                kind = "best"
            case {"event": "train", "step": 1}:
                kind, text = "start", "the first step is done"
            case {"event": "done"}:
                kind = "end"
        if kind:
            yield Told(event.get("wall_seconds") or 0.0, kind, private.text(text))
