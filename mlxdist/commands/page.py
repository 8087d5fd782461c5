"""The command `mlxdist view`, and the page beside a run that `launch --view` starts."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

STOP_SECONDS = 5.0


def view(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="The output folders of runs, or their run.toml.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port of the page. Default: a free one.")] = 0,
    launched: Annotated[bool, typer.Option("--launched", hidden=True)] = False,
) -> None:
    """Show runs in a browser, while they train or later: curves, the timeline of each step, losses, checkpoints.

    The page is read-only, for this Mac alone, and needs no network. Several runs are laid over each other.
    """
    from mlxdist.coordinator.view.serve import serve

    serve(runs, port, launched=launched)


@contextmanager
def page_beside(output: Path) -> Iterator[None]:
    """Serves the page of the run in `output` from a process of its own while the block lasts; prints its address.

    Raises UserError without the extra `view`.
    """
    from mlxdist.coordinator.view.serve import require_extra

    require_extra()
    command = [sys.executable, "-m", "mlxdist", "view", str(output), "--launched"]
    # In a session of its own, so that Ctrl-C reaches the run alone; it ends when its standard input is closed.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as page:
        assert page.stdin is not None
        assert page.stdout is not None
        print(f"the page of this run: {page.stdout.readline().decode().strip()}", flush=True)
        try:
            yield
        finally:
            page.stdin.close()
            try:
                page.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                page.kill()
