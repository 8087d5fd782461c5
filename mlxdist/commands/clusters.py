"""The commands for other Macs: the file that lists them, what is put on them, what is wrong with them."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlxdist.commands.open_files import more_open_files
from mlxdist.commands.options import AsJson, Changes, RunFile
from mlxdist.protocol.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from mlxdist.coordinator.config.hosts import Hosts

hosts = typer.Typer(no_args_is_help=True, help="The file that lists the Macs of a cluster.")


@hosts.command("init")
def hosts_init(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[USER@]HOST...", help="Default: list those that Bonjour finds.")
    ] = None,
    output: Annotated[Path, typer.Option(metavar="HOSTS.TOML", help="The file to write.")] = Path("hosts.toml"),
    ssh_options: Annotated[str, typer.Option(metavar="WORDS", help="Words for ssh, as '-J gate -p 2222'.")] = "",
) -> None:
    """Look at Macs over ssh, and write a first hosts.toml with a key for each. Nothing is overwritten."""
    import shlex

    if not names:
        from mlxdist.coordinator.launch.nearby import nearby_hosts

        found = nearby_hosts()
        if not found:
            raise UserError(
                "no Mac with Remote Login was found in this network: name them, as mlxdist hosts init mini-1"
            )
        print("\n".join(found))
        print(f"\nType, with those that you want:\n  mlxdist hosts init {shlex.join(found)}")
        return
    from mlxdist.coordinator.launch.hosts_init import describe, write_hosts
    from mlxdist.keys.store import KeyStore

    looked = write_hosts(output, names, shlex.split(ssh_options), KeyStore.of_user())
    for one in looked:
        print(f"{one.name}: {one.fault or describe(one.seen)}")
    print(f"wrote {output}, and a key for each node")
    print(f"next, type: mlxdist sync --hosts {shlex.quote(str(output))} run.toml")
    sys.exit(1 if any(one.fault for one in looked) else 0)


def sync(
    hosts: Annotated[Path, typer.Option(metavar="HOSTS.TOML", help="The Macs to sync.")],
    run: RunFile = None,
    clean: Annotated[bool, typer.Option("--clean", help="Remove old environments and their files as well.")] = False,
    set_: Changes = None,
) -> None:
    """Put an equal environment and the run's model on every host, over ssh. Only this Mac downloads."""
    from rich.console import Console

    from mlxdist.coordinator.config.hosts import load_hosts

    cluster = load_hosts(hosts)
    model = model_of(cluster, run, set_)
    code = synced(cluster, model, Console(), clean=clean)
    if not model:
        print(f"no run is named, so no model was copied: mlxdist sync --hosts {hosts} run.toml does that, too")
    sys.exit(code)


def doctor(
    hosts: Annotated[Path, typer.Option(metavar="HOSTS.TOML", help="The Macs to look at.")],
    run: RunFile = None,
    json: AsJson = False,
    set_: Changes = None,
) -> None:
    """Look at every host and say what would keep it from training, with the cure. Exit code 1: a host is blocked."""
    from rich.console import Console

    from mlxdist.coordinator.config.hosts import load_hosts
    from mlxdist.coordinator.doctor.doctor import examine
    from mlxdist.coordinator.doctor.view import as_json, show
    from mlxdist.coordinator.memory.model_files import find_model
    from mlxdist.coordinator.sync.model_files import model_files
    from mlxdist.protocol.versions import versions

    more_open_files()
    cluster = load_hosts(hosts)
    model = model_of(cluster, run, set_)
    reports = examine(cluster, versions(), model, model_files(model) if model and find_model(model) else ())
    if json:
        print(as_json(reports))
    else:
        show(reports, Console())
    sys.exit(int(any(report.blocked for report in reports)))


def model_of(cluster: "Hosts", run: Path | None, changes: Sequence[str] | None) -> str:
    """Returns the model of the run that is named, by a file or by hosts.toml; "" where none is."""
    from mlxdist.coordinator.config.load import load_config

    return load_config(run or cluster.run, changes or ()).model if run or cluster.run else ""


def synced(cluster: "Hosts", model: str, console: "Console", *, clean: bool) -> int:
    """Syncs all hosts, shows how, and returns the exit code of the command."""
    from mlxdist.coordinator.sync.downloads import cache_folder
    from mlxdist.coordinator.sync.sync import sync
    from mlxdist.coordinator.sync.view import show
    from mlxdist.interrupts import interruptible

    with interruptible():  # a closed terminal ends the copies, too
        return show(sync(cluster, model, cache_folder(os.environ), clean_up=clean), console)
