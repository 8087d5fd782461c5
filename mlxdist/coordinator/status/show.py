"""The command `mlxdist status`: a run as it is, as JSON, or watched until it ends."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from mlxdist.coordinator.config.hosts import Hosts, is_local
from mlxdist.coordinator.config.load import load_config
from mlxdist.coordinator.launch.elsewhere import RESULTS, elsewhere
from mlxdist.coordinator.launch.ssh import Target, target_of
from mlxdist.coordinator.overview.find import run_in
from mlxdist.coordinator.report.display import Unbreakable, open_display
from mlxdist.coordinator.report.live import LiveDisplay
from mlxdist.coordinator.report.picture import Picture, recalled
from mlxdist.coordinator.status.looks import LocalRun, Watched
from mlxdist.coordinator.status.remote import RemoteRun
from mlxdist.coordinator.status.watch import SHOWN, say_stopped, show, show_to_the_end
from mlxdist.coordinator.storage.run_folder import finite
from mlxdist.protocol.errors import UserError

WIDE = 100  # columns for a file or a pipe, which have no width
REPORT_EVERY = 10  # steps between lines, where the run's own setting is not known


@contextmanager
def run_named(name: str, hosts: Hosts | None, *, repeat: bool) -> Iterator[Watched]:
    """Gives the run that a person has named: a folder, a run file, HOST:FOLDER, or a run of the coordinator of `hosts`.

    Raises UserError where there is no run, NodeError where its host cannot be reached.
    """
    file = Path(name)
    if hosts is not None and not is_local(hosts.coordinator.host):
        run_file = file if name else hosts.run or Path("run.toml")
        place = elsewhere(hosts, load_config(run_file).output.name if run_file.suffix == ".toml" else run_file.name)
        with RemoteRun(target_of(place.node), f"{place.folder}/{RESULTS}", repeat=repeat) as remote:
            yield remote
        return
    host, colon, folder = name.partition(":")
    if colon and host and "/" not in host and not file.exists():
        user, _, host = host.rpartition("@")
        if not folder:
            raise UserError(f"{name}: the run's folder on {host} is missing, as in {host}:runs/my-run")
        with RemoteRun(Target(host, user), folder, repeat=repeat) as remote:
            yield remote
        return
    path = load_config(file).output if file.is_file() else file.absolute()
    if run_in(path) is None:
        raise UserError(f"{path} holds no run: mlxdist runs FOLDER lists those below a folder")
    yield LocalRun(path)


def show_status(
    name: str, hosts: Hosts | None, *, watch: bool, as_json: bool, stream: TextIO, environ: Mapping[str, str]
) -> None:
    """Prints a run as it is, or shows it until it ends. Raises UserError, and NodeError for a host that is lost."""
    with run_named(name, hosts, repeat=watch) as run:
        if as_json:
            print(json.dumps(finite(facts_of(run)), ensure_ascii=False, indent=2), file=stream)
        elif watch:
            with open_display(stream, title=run.name, report_every=REPORT_EVERY, environ=environ) as display:
                show_to_the_end(run, display)
        else:
            steady: Any = Unbreakable(stream)
            console = Console(file=steady, width=None if stream.isatty() else WIDE, highlight=False, _environ=environ)
            still = LiveDisplay(console, title=run.name, clock=time.monotonic)
            seen = show(run, still, watch=False)
            if seen.told is None and seen.look.held is False:
                say_stopped(seen, still)
            elif seen.told is None:
                console.print(still.draw())


def facts_of(run: Watched) -> dict[str, Any]:
    """Returns what a look at a run shows, as JSON has it."""
    look = run.look()
    picture, news = recalled(look.events, SHOWN)
    last = picture.last or {}
    return {
        "run": run.name,
        "state": state_of(picture, look.held),
        "busy": picture.busy,
        "seconds_since_last_event": round(picture.since(look.now), 1),
        "wall_seconds": picture.at,
        "seconds_left": picture.seconds_left,
        "step": last.get("step", 0),
        "total_steps": picture.total_steps,
        "progress": picture.progress,
        "loss": last.get("loss"),
        "tokens_per_second": last.get("tokens_per_second"),
        "validations": [{"step": step, "loss": loss} for step, loss in picture.vals],
        "best_validation": picture.best and {"step": picture.best[0], "loss": picture.best[1]},
        "nodes": {name: asdict(node) for name, node in picture.nodes.items()},
        "news": [{"wall_seconds": seconds, "message": sentence} for seconds, sentence in news],
    }


def state_of(picture: Picture, held: bool | None) -> str:
    """Returns the state of a run: how it ended; else training, stopped without a word, or "unknown"."""
    if picture.ending:
        return picture.ending
    return {True: "training", False: "stopped", None: "unknown"}[held]
