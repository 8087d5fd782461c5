"""Options that several commands have."""

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mlxdist.protocol.errors import UserError

if TYPE_CHECKING:
    from mlxdist.coordinator.config.hosts import Hosts

RunFile = Annotated[
    Path | None, typer.Argument(metavar="RUN.TOML", help="The run's settings. Default: run.toml in this folder.")
]
HostsFile = Annotated[
    Path | None, typer.Option(metavar="HOSTS.TOML", help="The Macs to work on. Default: this machine alone.")
]
NodeCount = Annotated[int | None, typer.Option(min=1, help="Nodes on this machine, instead of --hosts. Default: 1.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, as train.steps=20. May be given several times."),
]
InsecureLan = Annotated[
    bool,
    typer.Option(
        "--insecure-lan",
        help="Connect to other Macs without encryption and keys: everyone on the network can then read the training "
        "data and the adapter, change the gradients, and end the run.",
    ),
]
Wait = Annotated[str, typer.Option(help="The time to wait for a run to start, or to come back: 30s, 10m, 12h.")]
Models = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Where a model lies that comes from the coordinator. Default: ~/mlxdist/models."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="The output folder of a run, or its run.toml.")]
BaseModel = Annotated[str, typer.Option(help="The base model's folder or hub id, where it has moved.")]


def models_folder(folder: Path | None) -> str:
    """Returns the folder for models that come from a coordinator, as a node takes it."""
    return str(folder.expanduser().absolute()) if folder is not None else ""


def cluster_of(hosts: Path | None, nodes: int | None, mixed: Literal["spare", "allow"] | None = None) -> "Hosts":
    """Returns the nodes of a hosts file, or so many on this machine; `mixed` stands for the key of the file.

    Raises UserError where both are given, and for a faulty file.
    """
    from mlxdist.coordinator.config.hosts import load_hosts, local_hosts

    if hosts is not None and nodes is not None:
        raise UserError("--nodes counts nodes on this machine, and --hosts lists them in a file: give one of the two")
    cluster = load_hosts(hosts) if hosts is not None else local_hosts(nodes or 1)
    return replace(cluster, coordinator=replace(cluster.coordinator, mixed=mixed or cluster.coordinator.mixed))


def seconds_of(text: str) -> float:
    """Returns the seconds in a time as 30s, 10m or 12h. Raises UserError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text)
    if match is None:
        raise UserError(f"--wait {text}: give a number with s, m or h, for instance 30m")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
