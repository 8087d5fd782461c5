"""A first look at a host before a run: its hardware, its packages, the way from it to here, what else runs there.

One script for macOS and Linux, with absolute paths and without a file written; the tests hold outputs of both.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from mlxdist.coordinator.config.hosts import NodeSpec
from mlxdist.coordinator.launch.findings import Finding, finding, talk_finding, version_finding
from mlxdist.coordinator.launch.quoting import path_word, quote
from mlxdist.coordinator.launch.ssh import Answer, Target, run, target_of
from mlxdist.coordinator.launch.workdir import interpreter_of, model_of
from mlxdist.macos import CHIP, MEMORY, RELEASE
from mlxdist.protocol.untrusted import quoted
from mlxdist.protocol.versions import CODE, PACKAGES, versions

LOOK_SECONDS = 45.0
SUPERVISOR = "mlxdist node --launched"
HARDWARE = (
    'echo "user $(id -un)"; echo "home $HOME"; echo "system $(uname -s)"; echo "machine $(uname -m)"; '
    'echo "address ${SSH_CONNECTION%% *}"; '
    'if [ "$(uname -s)" = Darwin ]; then '
    f'echo "release $({RELEASE})"; echo "chip $({CHIP})"; echo "bytes $({MEMORY})"; '
    'else echo "release $(uname -r)"; echo "chip $(sed -n "s/^model name.*: //p" /proc/cpuinfo | head -n 1)"; '
    'echo "kilobytes $(sed -n "s/^MemTotal: *\\([0-9]*\\).*/\\1/p" /proc/meminfo)"; fi; '
)
RUNNING = f'ps -axww -o pid=,args= | grep "[m]{SUPERVISOR[1:]}" | while read -r LINE; do echo "other $LINE"; done; '
VERSIONS = (  # an older mlxdist may have no hash of its code
    "import importlib as i, importlib.metadata as m, importlib.util as u, mlxdist; "
    "print('version mlxdist', mlxdist.__version__); "
    f"[print('version', n, m.version(n)) for n in {PACKAGES}]; N = 'mlxdist.protocol.versions'; "
    f"u.find_spec(N) and print('version {CODE}', i.import_module(N).code_hash())"
)


@dataclass(frozen=True)
class Seen:
    """A host as it was seen. `blocks`: why no node can run there; None: nothing that was looked at is in the way."""

    blocks: Finding | None = None
    notes: tuple[str, ...] = ()  # what a person should know, and what does not keep it from training
    user: str = ""
    home: str = ""
    system: str = ""  # Darwin or Linux
    machine: str = ""
    release: str = ""
    chip: str = ""
    memory_bytes: int = 0  # 0: unknown
    address: str = ""  # of this machine, as the host sees it; "" without ssh
    versions: Mapping[str, str] = field(default_factory=dict)
    models: tuple[str, ...] = ()  # folders of the run's model that are there, the best first
    others: tuple[str, ...] = ()  # nodes of other runs: the command line of each


def hardware_script() -> str:
    """Returns the script that asks for the hardware alone, for a host on which nothing is installed yet."""
    return f"{HARDWARE}true"


def look_script(interpreter: str, models: Sequence[str]) -> str:
    """Returns the script that looks at a host, one line for /bin/sh; its exit code is that of the interpreter.

    `models`: folders in which the model may lie.
    """
    folders = " ".join(path_word(model) for model in models)
    look = f'for M in {folders}; do [ -f "$M/config.json" ] && echo "model $M"; done; ' if models else ""
    python = path_word(interpreter)
    check = f'P={python}; [ -x "$P" ] || {{ echo "$P: not found" >&2; exit 127; }}; exec "$P" -c {quote(VERSIONS)}'
    return f"{HARDWARE}{RUNNING}{look}{check}"


def model_folders(node: NodeSpec, model: str) -> list[str]:
    """Returns where the run's model may lie on the host of a node that is reached over ssh, the first choice first."""
    synced = model_of(node, model)
    return [synced] if node.model or not model.startswith("/") else [synced, model]


def read_look(answer: Answer) -> Seen:
    """Returns what a host has answered to either script. What it did not say, or said unclearly, stays empty."""
    pairs = [line.partition(" ")[::2] for line in answer.out.splitlines()]
    said = dict(reversed(pairs))
    memory = _number(said.get("bytes", "")) or 1024 * _number(said.get("kilobytes", ""))
    versions = (value.split(" ", 1) for key, value in pairs if key == "version")
    return Seen(
        user=said.get("user", ""),
        home=said.get("home", ""),
        system=said.get("system", ""),
        machine=said.get("machine", ""),
        release=said.get("release", ""),
        chip=said.get("chip", ""),
        memory_bytes=memory,
        address=said.get("address", ""),
        versions=MappingProxyType({each[0]: each[1] for each in versions if len(each) == 2}),
        models=tuple(value for key, value in pairs if key == "model"),
        others=tuple(value for key, value in pairs if key == "other"),
    )


def _number(text: str) -> int:
    return int(text) if text.isdigit() and len(text) < 19 else 0


def look_at(node: NodeSpec, model: str) -> Seen:
    """Looks at the host of a node for a run of `model`, a hub id or a folder of this machine."""
    target = target_of(node)
    if target.local:
        interpreter, folders = node.python or sys.executable, [node.model] if node.model else []
    else:
        interpreter, folders = interpreter_of(node), model_folders(node, model)
    answer = run(target, look_script(interpreter, folders), timeout=LOOK_SECONDS)
    fetched = not node.model and not model.startswith("/")  # by the node itself, from the hub
    return judged(target, answer, interpreter, [] if fetched else folders)


def run_named(line: str) -> str:
    """Returns the run of a supervisor, by its command line: the tag without its random end."""
    found = re.search(r" --tag (\S+)\.[0-9a-f]+(?: |$)", line)
    return quoted(found[1] if found else line, 60)


def judged(target: Target, answer: Answer, interpreter: str, folders: Sequence[str]) -> Seen:
    """Returns what an answer to `look_script` shows, and what keeps the host from training.

    `folders`: in one of them the model must be.
    """
    seen = read_look(answer)
    blocks = finding(target, answer, interpreter)
    if blocks is None and answer.code != 0:
        last = (answer.err.strip().splitlines() or ["no word"])[-1]
        blocks = Finding(
            "interpreter",
            f"its interpreter failed: {last}",
            "Type mlxdist sync --hosts hosts.toml run.toml, or launch with --sync",
        )
    if blocks is None:
        blocks = version_finding(versions(), seen.versions)
    if blocks is None and folders and not seen.models:
        blocks = Finding(
            "model missing",
            f"it does not have the model: no config.json in {' or '.join(folders)}",
            "Type mlxdist sync --hosts hosts.toml run.toml (or launch with --sync), or set model for it in hosts.toml",
        )
    talk = talk_finding(answer)
    notes = [str(talk)] if talk is not None else []
    if seen.others:
        names = dict.fromkeys(run_named(other) for other in seen.others)
        notes.append(f"other runs work there and share its memory: {', '.join(names)}")
    return replace(seen, blocks=blocks, notes=tuple(notes))
