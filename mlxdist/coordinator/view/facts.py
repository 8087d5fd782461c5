"""The facts of a run as the page gets them: how far it is, its nodes, losses and checkpoints, its configuration."""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlxdist.coordinator.config.keys import flat, hints
from mlxdist.coordinator.overview.compare import NEVER_EQUAL
from mlxdist.coordinator.overview.find import is_held
from mlxdist.coordinator.report.goodput import lost_time
from mlxdist.coordinator.storage.open_run import read_manifest
from mlxdist.coordinator.storage.run_folder import RunFolder, finite, read_json
from mlxdist.coordinator.view.troubles import cost_of
from mlxdist.coordinator.view.watched_run import Told, WatchedRun

RECENT = 50  # steps that the time left is estimated from
ACTIVE = ("leaf", "copy", "audit", "score")  # rows of a timeline in which a node computes


def facts_of(run: WatchedRun) -> dict[str, Any]:
    """Returns all of a run but its curves and timelines; what is not known is null."""
    with run.lock:
        told, folder = run.told, run.folder
        manifest = read_manifest(folder) or {}
        state = told.status or state_now(folder, begun=bool(manifest))
        lost = lost_time(list(told.times.values()), told.redone, sum(told.pauses.values()), told.wall_seconds)
        facts = {
            "path": str(folder.path),
            "method": manifest.get("method"),
            "model": manifest.get("base_model"),
            "created_at": manifest.get("created_at"),
            "state": state,
            "step": told.step,
            "total_steps": told.total_steps,
            "wall_seconds": told.wall_seconds,
            "seconds_left": seconds_left(told) if state == "training" else None,
            "promise": told.promise,
            "paused": told.paused and state == "training",
            "best": told.best and {"step": told.best["step"], "path": told.best["path"]},
            "last": {name: curve.last for name, curve in told.curves.items()},
            "lost": asdict(lost),
            "nodes": list(nodes_of(told)),
            "troubles": list(troubles_of(told)),
            "checkpoints": list(checkpoints_of(run)),
            "said": list(told.said)[-30:],
            "config": settings_of(folder),
        }
    return dict(finite(facts))  # type: ignore[call-overload, no-any-return]


def state_now(folder: RunFolder, *, begun: bool) -> str:
    """Returns the state of a run that has told no end: training, stopped, elsewhere (not seen from here) or waiting."""
    held = is_held(folder)
    if held is None:
        return "elsewhere"
    return "training" if held else "stopped" if begun else "waiting"


def seconds_left(told: Told) -> float | None:
    """Returns the seconds to the last step, by the wall clock over the last steps, evaluations and pauses included."""
    before = told.step - RECENT if told.step - RECENT in told.ended else min(told.ended, default=told.step)
    if told.total_steps is None or before >= told.step:
        return None
    return (told.ended[told.step] - told.ended[before]) / (told.step - before) * (told.total_steps - told.step)


def nodes_of(told: Told) -> Iterator[dict[str, Any]]:
    """Yields the nodes by name: the last that was told of each, its speed and its memory peak."""
    for name, event in sorted(told.nodes.items()):
        speed, peak = (told.curves.get(f"node/{name}/{what}") for what in ("tokens_per_second", "peak_gb"))
        yield {
            "name": name,
            "state": event["state"],
            "message": event["message"],
            "tokens_per_second": speed and speed.last,
            "peak_gb": peak and peak.last,
        }


def troubles_of(told: Told) -> Iterator[dict[str, Any]]:
    """Yields the losses, the last one first, each with what its step lost."""
    for trouble in reversed(told.troubles.all):
        step = trouble.step
        time = told.times.get(step) if step is not None and not trouble.evaluation else None
        lost = trouble.seconds if trouble.evaluation else cost_of(step, told.times) if step is not None else None
        yield {
            **asdict(trouble),
            "lost_seconds": lost,
            "paused_seconds": trouble.seconds if trouble.evaluation else time and time.seconds_paused,
            "leaves_recomputed": time and time.leaves_recomputed,
            "step_seconds": time and time.seconds,
            "away_seconds": None if trouble.back is None else trouble.back - trouble.wall,
        }


def checkpoints_of(run: WatchedRun) -> Iterator[dict[str, Any]]:
    """Yields the checkpoints that are still there, the newest first, with the commands that use each."""
    vals = run.told.curves.get("val/loss")
    losses = dict(zip(vals.steps, vals.values, strict=True)) if vals else {}
    place = shlex.quote(str(run.folder.path))
    best = (run.told.best or {}).get("path")
    for path, event in sorted(run.told.saved.items(), key=lambda item: -item[1]["step"]):
        if (run.folder.path / path).is_dir():
            step = event["step"]
            yield {
                "step": step,
                "path": path,
                "best": path == best,
                "loss": losses.get(step),
                "commands": {
                    "ask it": f'mlxdist generate {place} "…" --checkpoint {step}',
                    "judge it": f"mlxdist evaluate {place} --checkpoint {step}",
                    "export it": f"mlxdist export {place} OUT --checkpoint {step}",
                },
            }


def settings_of(folder: RunFolder) -> dict[str, Any]:
    """Returns the resolved configuration by key, but the output folder; nothing before it is written."""
    with suppress(OSError, ValueError):
        known = hints()
        return {key: value for key, value in flat(read_json(folder.config)) if key in known and key != NEVER_EQUAL}
    return {}


def timeline_of(run: WatchedRun, wanted: int | None) -> dict[str, Any]:
    """Returns the timeline of a step (None: the last), with its neighbors that have one, and what was lost in it."""
    with run.lock:
        told = run.told
        steps = sorted(told.places)
        if not steps:
            return {"step": None}
        step = steps[-1] if wanted is None else min(steps, key=lambda one: (abs(one - wanted), one))
        place, time = steps.index(step), told.times.get(step)
        event = run.work_of(step)
        began = told.ended.get(step, 0.0) - (time.seconds if time else 0.0)
        troubles = [trouble for trouble in run.troubles_in(step) if not trouble.evaluation]
        answer = {
            "step": step,
            "before": steps[place - 1] if place else None,
            "after": steps[place + 1] if place + 1 < len(steps) else None,
            "seconds": time.seconds if time else None,
            "lost_seconds": cost_of(step, told.times) if time and time.disturbed else 0.0,
            "paused_seconds": time.seconds_paused if time else 0.0,
            "leaves_recomputed": time.leaves_recomputed if time else 0,
            "lanes": [lane_of(name, work) for name, work in event.get("nodes", {}).items()],
            "troubles": [
                {**asdict(trouble), "at": trouble.wall - began, "back_at": trouble.back and trouble.back - began}
                for trouble in troubles
            ],
        }
    return dict(finite(answer))  # type: ignore[call-overload, no-any-return]


def lane_of(name: str, work: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the lane of a node: its rows in seconds, and sums of them."""
    rows: list[tuple[str, float, float, int, int]] = []
    free = 0.0  # a worker computes one leaf at a time: messages on their way let two seem to overlap
    for kind, began, ended, start, stop in sorted(work["rows"], key=lambda row: row[2]):
        began, ended = began / 1000, ended / 1000
        if kind in ACTIVE:
            began = min(max(began, free), ended)
            free = ended
        rows.append((kind, began, ended, start, stop))

    def seconds(*kinds: str) -> float:
        return float(sum(ended - began for kind, began, ended, *_ in rows if kind in kinds))

    return {
        "node": name,
        "rows": rows,
        "leaves": sum(stop - start for kind, _, _, start, stop in rows if kind in ("leaf", "copy")),
        "copies": sum(stop - start for kind, _, _, start, stop in rows if kind == "copy"),
        "computing": seconds(*ACTIVE),
        "sending": seconds("up"),
        "receiving": seconds("down"),
        "waiting_for_room": seconds("room"),
        "in_vain": seconds("lost", "dropped"),
        "losses": sum(kind == "lost" for kind, *_ in rows),
    }


def names_of(paths: list[Path]) -> list[str]:
    """Returns a short name for each path: its last parts, as many as make them differ."""
    count = next((n for n in range(1, 9) if len({path.parts[-n:] for path in paths}) == len(set(paths))), 9)
    return [str(Path(*path.parts[-count:])) for path in paths]
