"""`mlxdist sync` on a terminal: a bar per host; elsewhere a line per stage."""

from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from mlxdist.coordinator.sync.sync import Progress


def show(progress: Iterable[Progress], console: Console) -> int:
    """Shows the progress until its end. Returns the exit code: 1 when a host failed."""
    failed = False
    stages: dict[str, str] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
        tasks: dict[str, TaskID] = {}
        for item in progress:
            if not item.stage:
                failed |= item.failed
                console.print(f"{item.host}: {item.result}", markup=False, highlight=False, soft_wrap=True)
            elif not console.is_terminal and stages.get(item.host) != item.stage:
                console.print(f"{item.host}: {item.stage}", markup=False, highlight=False, soft_wrap=True)
            stages[item.host] = item.stage
            if item.host not in tasks:
                tasks[item.host] = bars.add_task(item.host, total=None)
            words = f"{item.host}: {item.stage or 'done'}"
            bars.update(tasks[item.host], description=words, completed=item.done, total=item.total or None)
    return int(failed)
