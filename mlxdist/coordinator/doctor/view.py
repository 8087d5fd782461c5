"""The doctor's reports as a table with sentences below it, or as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlxdist.coordinator.doctor.doctor import HostReport

STYLES = {"ok": "", "unknown": "dim", "warning": "yellow", "blocks": "bold red"}


def as_json(reports: Sequence[HostReport]) -> str:
    """Returns all reports as JSON: `ok` is False when a host is blocked."""
    hosts = [{**asdict(report), "blocked": report.blocked} for report in reports]
    return json.dumps({"ok": not any(report.blocked for report in reports), "hosts": hosts}, indent=2)


def show(reports: Sequence[HostReport], console: Console) -> None:
    """Prints one column per host, one row per check, and a sentence with its cure for each finding."""
    names = list(dict.fromkeys(check.name for report in reports for check in report.checks))
    table = Table("", *(report.name for report in reports), box=None, header_style="bold")
    for name in names:
        cells = []
        for report in reports:
            check = next((check for check in report.checks if check.name == name), None)
            cells.append(Text(check.value, STYLES[check.level]) if check else Text("-", "dim"))
        table.add_row(name, *cells)
    console.print(table)
    console.print()
    for report in reports:
        for check in report.checks:
            if check.what:
                mark = "BLOCKS" if check.level == "blocks" else check.level
                sentence = f"{report.name}: {mark}: {check.what}. {check.cure}."
                console.print(Text(sentence, STYLES[check.level]), soft_wrap=True)
    blocked = [report.name for report in reports if report.blocked]
    if blocked:
        console.print(f"A run cannot use {', '.join(blocked)} as it is.", highlight=False, soft_wrap=True)
    else:
        console.print("A run can use every host.", highlight=False)
