"""A run whose coordinator is another Mac: sent there, started there, watched from here, its results fetched.

This terminal is only a viewer. It may close, sleep or lose its network: the run goes on.
"""

import re
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlxdist.coordinator.config.hosts import Hosts, NodeSpec
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.launch.findings import finding
from mlxdist.coordinator.launch.looking import model_folders
from mlxdist.coordinator.launch.quoting import path_word, quote, words
from mlxdist.coordinator.launch.ssh import Answer, argv, new_marker, run, target_of
from mlxdist.coordinator.launch.workdir import interpreter_of, workdir_of
from mlxdist.protocol.errors import NodeError, UserError

MODULE = "mlxdist.coordinator.launch.detached"
SEND_SECONDS = 3600.0
RESULTS = "out"
TABLE = re.compile(r"\s*\[+\s*([\w-]+)\s*\]")


@dataclass(frozen=True)
class Elsewhere:
    """The host of the coordinator, and the folder of this run there."""

    node: NodeSpec
    folder: str  # below the work folder

    def command(self, verb: str, more: str = "") -> str:
        """Returns the script that runs a verb of detached.py in the run's folder, after `cd`."""
        python = path_word(interpreter_of(self.node))
        enter = f'D={path_word(self.folder)}; mkdir -p "$D" && cd "$D" && D="$(pwd -P)" || exit 1; '
        return f'{enter}exec {python} -u -m {MODULE} {verb} "$D" {more}'.rstrip()


def elsewhere(hosts: Hosts, run_name: str) -> Elsewhere:
    """Returns the place of a run on the coordinator's host."""
    node = coordinator_node(hosts)
    return Elsewhere(node, f"{workdir_of(node)}/runs/{run_name}")


def coordinator_node(hosts: Hosts) -> NodeSpec:
    """Returns the coordinator's host as ssh reaches it: as its node in hosts.toml, else as the first node."""
    named = [node for node in hosts.nodes if node.host == hosts.coordinator.host]
    like = (*named, *hosts.nodes, NodeSpec(name="coordinator", host=hosts.coordinator.host))[0]
    return like if named else replace(like, name="coordinator", host=hosts.coordinator.host)


def send(place: Elsewhere, config: RunConfig, run_file: Path, hosts_file: Path) -> list[str]:
    """Copies all that a run reads to its host. Returns the words of `--set` with which it finds them there.

    Raises NodeError where the host cannot be reached, or takes no file.
    """
    changes = [f"output={RESULTS}"]
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            _add_text(archive, "run.toml", run_file.read_text(encoding="utf-8"))
            _add_text(archive, "hosts.toml", own_hosts(hosts_file.read_text(encoding="utf-8")))
            for key, path in (
                ("data.path", config.data.path),
                ("data.valid_path", config.data.valid_path),
                ("lora.init_adapter", config.lora.init_adapter),
            ):
                if path.startswith("/"):
                    inside = f"input/{key}/{Path(path).name}"
                    archive.add(path, inside)
                    changes.append(f"{key}={inside}")
            if config.data.chat_template:
                _add_text(archive, "input/chat_template.jinja", config.data.chat_template)
                changes.append("data.chat_template=input/chat_template.jinja")
        file.seek(0)
        enter = f'D={path_word(place.folder)}; mkdir -p "$D" && cd "$D" && rm -rf input && tar -xf -'
        _checked(place, run(target_of(place.node), enter, stdin=file, timeout=SEND_SECONDS))
    return changes


def _add_text(archive: tarfile.TarFile, name: str, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        archive.add(file.name, name)


def own_hosts(text: str) -> str:
    """Returns a hosts.toml for the coordinator's host itself: without `run`, and without the host of [coordinator]."""
    kept, table = [], ""
    for line in text.splitlines(keepends=True):
        if match := TABLE.match(line):
            table = match[1]
        key = line.partition("=")[0].strip()
        if (table, key) not in (("", "run"), ("coordinator", "host")):
            kept.append(line)
    return "".join(kept)


def start(place: Elsewhere, config: RunConfig, changes: Sequence[str], options: Sequence[str]) -> None:
    """Starts the run on its host. `changes`: of --set; `options`: further words of launch. Raises NodeError."""
    sets = words(*(word for change in changes for word in ("--set", change)))
    find, model = "", ""
    if config.model.startswith("/"):
        folders = " ".join(map(path_word, model_folders(place.node, config.model)))
        find = f'for M in {folders}; do [ -f "$M/config.json" ] && break; M=; done; '
        find += f'[ "$M" ] || {{ echo {quote(f"no model at {folders}")} >&2; exit 1; }}; '
        model = ' --set "model=$M"'
    given = f"run.toml --hosts hosts.toml {words(*options)} {sets}{model}"
    _checked(place, run(target_of(place.node), find + place.command("start", given)))


def result(place: Elsewhere) -> Answer:
    """Returns the exit code of a run that has ended, and what it has printed as errors; NOTHING where it has no code.

    Raises NodeError where its host cannot be reached.
    """
    answer = run(target_of(place.node), place.command("result"))
    if not answer.reached:  # else its errors are those of the run
        _checked(place, answer)
    return answer


def stop(place: Elsewhere) -> None:
    """Ends the run after its last step is saved. Raises NodeError."""
    _checked(place, run(target_of(place.node), place.command("stop"), timeout=120))


def fetch(place: Elsewhere, output: Path) -> None:
    """Copies the results of a run from its host into `output`. Raises NodeError, UserError."""
    marker = new_marker()
    script = f"cd {path_word(f'{place.folder}/{RESULTS}')} && tar -cf - --exclude ./state --exclude ./logs ."
    process = subprocess.Popen(
        argv(target_of(place.node), script, marker), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    with process.stdout:
        while (line := process.stdout.readline()) and line.rstrip(b"\r\n") != marker.encode():
            pass
        try:
            output.mkdir(parents=True, exist_ok=True)
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                archive.extractall(output, filter="data")
        except (OSError, tarfile.TarError) as error:
            raise UserError(f"the results could not be copied to {output}: {error}") from error
    process.wait()


def _checked(place: Elsewhere, answer: Answer) -> None:
    if not answer.ok:
        fault = finding(target_of(place.node), answer, interpreter_of(place.node))
        reason = str(fault) if fault is not None else answer.err.strip() or f"exit code {answer.code}"
        raise NodeError(f"{place.node.host}: {reason}")
