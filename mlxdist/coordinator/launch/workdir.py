"""The work folder of mlxdist on a host, and what lies where in it. Nothing is written outside of it.

~/mlxdist/                     the default of `workdir`
    env/current                link to the newest environment
    env/0.1.0-1a2b3c4d5e6f/    a Python environment, named by the hash of all that it holds
    models/NAME/               models, without the links of the hub's cache
    models/0123…ef/            a model that came over the wire, named by the hash of its files
    hashes.json                at a coordinator: the hashes of the model files that it has sent
    memory/                    at a coordinator: the memory of models' layers, as machines have measured it
    uv/, python/, wheels/      what environments are made from, without the internet
"""

import re
from pathlib import Path

from mlxdist.coordinator.config.hosts import NodeSpec
from mlxdist.protocol.model_files import WORK_FOLDER

DEFAULT = f"~/{WORK_FOLDER}"


def workdir_of(node: NodeSpec) -> str:
    """Returns the work folder on the node's host: absolute, or below the home folder there (~/ may lead)."""
    return node.workdir or DEFAULT


def interpreter_of(node: NodeSpec) -> str:
    """Returns the interpreter on the node's host: hosts.toml's own, or that of the environment that sync made."""
    return node.python or f"{workdir_of(node)}/env/current/bin/python"


def model_name(model: str) -> str:
    """Returns the name of a model's folder on a host, from its hub id or the path of its folder here."""
    name = Path(model).name if Path(model).is_absolute() else model.replace("/", "--")
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".-") or "model"


def model_of(node: NodeSpec, model: str) -> str:
    """Returns the folder of the run's `model` on the node's host: hosts.toml's own, or the one that sync copied."""
    return node.model or f"{workdir_of(node)}/models/{model_name(model)}"
