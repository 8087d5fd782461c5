"""The page of a report: every text and figure of it, ready for the template."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from mlxdist.coordinator.config.keys import flat
from mlxdist.coordinator.config.load import with_defaults
from mlxdist.coordinator.config.schema import as_json
from mlxdist.coordinator.html_report.chart import Chart
from mlxdist.coordinator.html_report.figures import charts_of, charts_of_all
from mlxdist.coordinator.html_report.gather import RunFacts
from mlxdist.coordinator.html_report.tables import Table, Title, table, tables_of
from mlxdist.coordinator.report.format import count, duration_phrase
from mlxdist.protocol.budget import format_bytes
from mlxdist.protocol.methods import METHODS
from mlxdist.protocol.version import VERSION

STATES = {
    "done": "finished",
    "interrupted": "interrupted",
    "failed": "failed",
    "training": "still training",
    "stopped": "ended without a word",
}


@dataclass(frozen=True)
class Tile:
    """One number that matters."""

    title: str
    value: str
    more: str = ""


@dataclass(frozen=True)
class Setting:
    """One key of the configuration. `changed`: it is not the default."""

    key: str
    value: str
    changed: bool


@dataclass(frozen=True)
class Group:
    """The keys of one table of run.toml."""

    title: str
    settings: Sequence[Setting]


@dataclass(frozen=True)
class RunPage:
    """The part of the page that shows one run."""

    over: str
    name: str
    lead: str
    tiles: Sequence[Tile]
    charts: Sequence[Chart]
    tables: Sequence[Table]
    settings: Sequence[Group]


@dataclass(frozen=True)
class Comparison:
    """The part that shows several runs over each other."""

    charts: Sequence[Chart]
    tables: Sequence[Table]


@dataclass(frozen=True)
class Page:
    """The whole page."""

    title: str
    runs: Sequence[RunPage]
    made: str
    comparison: Comparison | None = None


def page_of(runs: Sequence[RunFacts], now: datetime) -> Page:
    """Returns the page of some runs, made at `now`."""
    names = names_of([run.found.path for run in runs])
    made = f"Made by mlxdist {VERSION} on {now:%Y-%m-%d %H:%M}. This file is complete: it loads nothing."
    pages = [run_page(run, name) for run, name in zip(runs, names, strict=True)]
    if len(runs) == 1:
        return Page(f"{names[0]} · mlxdist", pages, made)
    return Page(f"{count(len(runs), 'run')} compared", pages, made, comparison_of(runs, names))


def names_of(paths: Sequence[Path]) -> list[str]:
    """Returns the names of different folders; where several have the same, with as many of those above as it takes."""
    names = [path.name for path in paths]
    for parts in range(2, max(len(path.parts) for path in paths)):
        twice = {name for name, number in Counter(names).items() if number > 1}
        names = [
            "/".join(path.parts[1:][-parts:]) if name in twice else name
            for path, name in zip(paths, names, strict=True)
        ]
    return names


def run_page(run: RunFacts, name: str) -> RunPage:
    """Returns the part of one run."""
    return RunPage(
        over=f"mlxdist report · started {run.found.created_at[:16].replace('T', ' ')} UTC",
        name=name,
        lead=lead_of(run),
        tiles=list(tiles_of(run)),
        charts=list(charts_of(run)),
        tables=list(tables_of(run)),
        settings=list(groups_of(run.settings, run.found.method)),
    )


def lead_of(run: RunFacts) -> str:
    """'DPO of SmolLM2-135M-Instruct on 3 nodes: finished after 120 steps in 2 min 13 s.'"""
    total = run.total_steps
    steps = (
        f"{run.found.steps:,} of {total:,} steps"
        if total and total != run.found.steps
        else count(run.found.steps, "step")
    )
    nodes = f" on {count(len(run.nodes), 'node')}" if run.nodes else ""
    wall = duration_phrase(run.found.history.wall_seconds)
    model = Path(run.found.model).name
    return f"{run.found.method.upper()} of {model}{nodes}: {STATES[run.found.state]}, {steps} in {wall}."


def tiles_of(run: RunFacts) -> Iterator[Tile]:
    """Yields the numbers at the top."""
    history, series = run.found.history, run.series
    if history.best is not None and history.best.loss is not None:
        yield Tile("Best validation", f"{history.best.loss:.4f}", f"after step {history.best.step:,}")
    if series.get("loss"):
        yield Tile("Training loss", f"{series['loss'][-1][1]:.4f}", f"at first {series['loss'][0][1]:.4f}")
    if accuracies := run.vals.get("rewards/accuracies") or series.get("rewards/accuracies"):
        yield Tile(
            "Reward accuracy", f"{100 * accuracies[-1][1]:.0f} %", "last evaluation" if run.vals else "last step"
        )
    if tokens := series.get("tokens"):
        trained = sum(value for _, value in tokens)
        seconds = sum(value for _, value in series.get("seconds", ())) or 1.0
        yield Tile("Trained tokens", _short(trained), f"{trained / seconds:,.0f} per second")
    if run.lost.goodput is not None:
        lost = f"{duration_phrase(run.lost.seconds_lost)} lost" if run.lost.seconds_lost >= 0.05 else "nothing lost"
        yield Tile("Goodput", f"{100 * run.lost.goodput:.0f} %", lost)
    if history.peak_gb:
        yield Tile("Peak memory", format_bytes(round(1e9 * history.peak_gb)), "of a node")


def groups_of(settings: Mapping[str, Any], method: str) -> Iterator[Group]:
    """Yields the settings by table. Those of preference training are left out where nothing uses them."""
    base = with_defaults({"method": method} if method in METHODS else {}, Path("run.toml"))
    defaults = dict(flat(as_json(base)))
    groups: dict[str, list[Setting]] = {}
    for key, value in settings.items():
        head, _, name = key.rpartition(".")
        if head == "preference" and method == "sft":
            continue
        changed = key not in ("model", "output", "data.path") and value != defaults.get(key)
        groups.setdefault(head, []).append(Setting(name, _value(value), changed))
    for head, found in groups.items():
        yield Group(f"[{head}]" if head else "run", found)


def comparison_of(runs: Sequence[RunFacts], names: Sequence[str]) -> Comparison:
    """Returns the losses over each other, the ends of the runs, and the settings that differ."""
    ends = []
    for run, name in zip(runs, names, strict=True):
        best = run.found.history.best
        loss = run.series.get("loss")
        ends.append(
            [
                *(name, run.found.method, STATES[run.found.state], f"{run.found.steps:,}"),
                "" if best is None or best.loss is None else f"{best.loss:.4f}",
                f"{loss[-1][1]:.4f}" if loss else "",
                duration_phrase(run.found.history.wall_seconds),
            ]
        )
    titles = [Title("run"), Title("method"), Title("state"), Title("steps", number=True)]
    titles += [Title(text, number=True) for text in ("best validation loss", "last training loss", "time")]
    keys = dict.fromkeys(key for run in runs for key in run.settings if key != "output")
    differ = [key for key in keys if len({json.dumps(run.settings.get(key)) for run in runs}) > 1]
    rows = [[key, *(_value(run.settings.get(key)) for run in runs)] for key in differ]
    tables = [table("Runs", titles, ends)]
    if rows:
        tables.append(table("Settings that differ", [Title("key", code=True), *map(Title, names)], rows))
    return Comparison(list(charts_of_all(runs, names)), tables)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_value, value)) or "—"
    if value is None or value == "" or value == {}:
        return "—"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _short(value: float) -> str:
    for size, unit in ((1e9, " B"), (1e6, " M"), (1e4, " k")):
        if value >= size:
            return f"{value / (1e3 if unit == ' k' else size):.3g}{unit}"
    return f"{value:,.0f}"
