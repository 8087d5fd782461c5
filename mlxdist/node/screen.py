"""The line that a person sees on a Mac that works for another one: for whom, how fast, and that Ctrl-C leaves."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mlxdist.macos import speed_limit
from mlxdist.node.supervisor import Supervisor
from mlxdist.protocol.limits import Heat
from mlxdist.protocol.messages import HeartbeatAck
from mlxdist.protocol.model_files import size_phrase

DRAW_SECONDS = 2.0
HEAT_EVERY = 15  # lines, between questions whether macOS slows the processor down


def line(
    place: str,
    standing: HeartbeatAck | None,
    percent: int | None,
    fetched: tuple[int, int] | None = None,
    heat: Heat = "",
) -> str:
    """Returns the line. `standing`: the coordinator's last word; None: none in this session. `percent`: the speed.

    `fetched`: bytes of the model that are here, of all, while it comes from there. `heat`: the thermal pressure, which
    every Mac says, while only some say a speed.
    """
    if standing is None:
        return f"waits for a run of {place}"
    if fetched is not None:
        here, size = fetched
        return f"gets the model from {place}: {100 * here // size} % of {size_phrase(size)}; Ctrl-C leaves"
    parts = []
    if standing.share:
        parts.append(f"{100 * standing.share:.0f} % of a step")
    if standing.tokens_per_second:
        parts.append(f"{standing.tokens_per_second:,.0f} tokens/s")
    if standing.peak_bytes >= 1e8:
        parts.append(f"{standing.peak_bytes / 1e9:.1f} GB")
    if percent is not None and percent < 100:
        parts.append(f"slowed to {percent} % by its heat")
    elif heat not in ("", "nominal"):
        parts.append(f"{heat} thermal pressure")
    return f"works for {place}: {', '.join(parts) or 'getting ready'}; Ctrl-C leaves"


@contextmanager
def screen(supervisor: Supervisor, place: str) -> Iterator[None]:
    """Shows the line on a terminal while the block lasts, and nothing elsewhere."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console, over = Console(stderr=True), threading.Event()
    if not console.is_terminal:
        yield
        return

    def draw() -> None:
        drawn, percent = 0, None
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while True:
                percent = speed_limit() if drawn % HEAT_EVERY == 0 else percent
                standing = supervisor.standing if supervisor.session is not None else None
                fetched = supervisor.worker.fetched if supervisor.worker is not None else None
                words = line(place, standing, percent, fetched, supervisor.strain.heat)
                live.update(Text(words, no_wrap=True, overflow="ellipsis"), refresh=True)
                drawn += 1
                if over.wait(DRAW_SECONDS):
                    return

    thread = threading.Thread(target=draw, name="screen", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
