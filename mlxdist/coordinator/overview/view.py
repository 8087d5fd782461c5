"""The list of runs, and two runs side by side, as tables."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlxdist.coordinator.overview.compare import Comparison
from mlxdist.coordinator.overview.find import FoundRun, saved_settings
from mlxdist.coordinator.report.format import duration_phrase
from mlxdist.coordinator.storage.run_folder import finite

TITLES = ("run", "method", "model", "steps", "best validation", "state", "time")


def print_runs(runs: list[FoundRun], folder: Path, console: Console) -> None:
    """Prints one line for each run."""
    if not runs:
        console.print(f"There is no run below {folder}.", soft_wrap=True, markup=False, highlight=False)
        return
    table = _table(*TITLES)
    for run in runs:
        facts = facts_of(run, folder)
        _add(
            table,
            facts["run"],
            facts["method"],
            Path(facts["model"]).name,
            str(facts["steps"]) + (f" of {facts['total_steps']}" if facts["total_steps"] else ""),
            _best(facts),
            facts["state"],
            duration_phrase(facts["wall_seconds"]),
        )
    console.print(table)


def facts_of(run: FoundRun, folder: Path) -> dict[str, Any]:
    """Returns the facts of one line, as JSON has them; the path is relative to `folder`."""
    history, best = run.history, run.history.best
    relative = run.path.relative_to(folder).as_posix() if run.path.is_relative_to(folder) else str(run.path)
    total = history.total_steps or (saved_settings(run).get("train") or {}).get("steps")
    return {
        "run": run.path.name if relative == "." else relative,
        "method": run.method,
        "model": run.model,
        "created_at": run.created_at,
        "steps": run.steps,
        "total_steps": total,
        "best_validation": None if best is None else best.loss,
        "best_step": None if best is None else best.step,
        "state": run.state,
        "wall_seconds": history.wall_seconds,
    }


def runs_as_json(runs: list[FoundRun], folder: Path) -> str:
    """Returns the list as JSON."""
    return json.dumps(finite([facts_of(run, folder) for run in runs]), ensure_ascii=False, indent=2)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Prints the settings that differ, then the last values of both runs."""
    names = _names([run.path for run in comparison.runs])
    if comparison.settings:
        table = _table("setting", *names)
        for key, both in comparison.settings.items():
            _add(table, key, *(json.dumps(value, ensure_ascii=False) for value in both))
        console.print(table)
    else:
        console.print("No setting differs but the output folder.")
    console.print()
    table = _table("at the end", *names)
    _add(table, "state", *(run.state for run in comparison.runs))
    for name, both in comparison.values.items():
        _add(table, name, *(_number(name, value) for value in both))
    console.print(table)


def _names(paths: list[Path]) -> list[str]:
    """The last parts of two paths, as many as make them differ."""
    count = next((n for n in range(1, 9) if paths[0].parts[-n:] != paths[1].parts[-n:]), 1)
    return [str(Path(*path.parts[-count:])) for path in paths]


def _best(facts: dict[str, Any]) -> str:
    if facts["best_validation"] is None:
        return ""
    return f"{facts['best_validation']:.4f} at step {facts['best_step']}"


def _number(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name == "wall_seconds":
        return duration_phrase(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def _add(table: Table, *cells: str) -> None:
    """Adds a row of texts, in which brackets are no markup."""
    table.add_row(*map(Text, cells))


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, overflow="fold")
    return table
