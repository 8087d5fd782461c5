"""The time that the rest of a run takes, as rich.progress estimates it from the latest steps."""

from collections.abc import Callable

from rich.console import Console
from rich.progress import Progress, ProgressColumn

# Long enough for steps of minutes and for evaluations and saves between them, short enough to follow a node that joins.
WINDOW_SECONDS = 1800.0


def new_progress(clock: Callable[[], float], *columns: ProgressColumn, console: Console | None = None) -> Progress:
    """Returns a progress whose estimates come from the last half hour, or its last 1000 steps."""
    return Progress(
        *columns, console=console, get_time=clock, speed_estimate_period=WINDOW_SECONDS, auto_refresh=False, expand=True
    )


def seconds_left(progress: Progress) -> float | None:
    """Returns the seconds to the end of the newest task, evaluations and saves included; None while not known."""
    return progress.tasks[-1].time_remaining if progress.tasks else None
