"""A small cluster on the bed of scripts/cluster_bed.py: hosts.toml, a run, and one environment that all Macs share."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from scripts.cluster_bed import Bed, cluster_bed
from scripts.cluster_bed_macs import UID
from tests.faults.namespaces import PORT

MADE = "mini-2"  # the Mac with the environment: csh, and a space in HOME
NAMES = ("mini-1", "mini-2", "mini-3", "mini-4")


@dataclass(frozen=True)
class BedCluster:
    """The bed, and a folder on its coordinator."""

    bed: Bed
    folder: Path
    before: Mapping[str, set[str]]  # the files in the home of each Mac before the first sync

    @property
    def python(self) -> Path:
        """The interpreter of the environment that sync makes on one Mac; the others can start it too."""
        return self.bed.home(MADE) / "mlxdist" / "env" / "current" / "bin" / "python"

    def hosts(self, name: str, nodes: Mapping[str, Mapping[str, str]]) -> Path:
        """Writes hosts.toml under another name. `nodes`: keys by name, which is the host unless it says so."""
        lines = ['run = "run.toml"', "[coordinator]", f"port = {PORT}"]
        for node, keys in nodes.items():
            values = {"name": node, "host": node, **keys}
            lines += ["[[nodes]]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
        path = self.folder / name
        path.write_text("\n".join(lines) + "\n")
        return path

    def all(self, name: str = "hosts.toml") -> Path:
        """Writes hosts.toml with all Macs: one makes its environment, the others use that."""
        return self.hosts(name, {mac: {} if mac == MADE else {"python": str(self.python)} for mac in NAMES})

    def mlxdist(self, *words: str, internet: bool = False) -> "CompletedProcess[str]":
        """Runs a command of mlxdist on the coordinator."""
        return self.bed.run(sys.executable, "-m", "mlxdist", *words, cwd=self.folder, internet=internet)

    def doctor(self, hosts: Path) -> tuple[int, dict[str, dict[str, Any]]]:
        """Returns the exit code of the doctor, and its checks by host and name."""
        done = self.mlxdist("doctor", "--hosts", str(hosts), "--json")
        assert done.stdout, done.stderr
        found = json.loads(done.stdout)["hosts"]
        return done.returncode, {one["name"]: {check["name"]: check for check in one["checks"]} for one in found}

    def files(self, name: str) -> set[str]:
        """Returns the names of everything in the home of a Mac."""
        return files_in(self.bed.home(name))

    def left(self) -> dict[str, list[str]]:
        """Returns the command lines of mlxdist that run on each Mac."""
        lines = {name: [" ".join(psutil.Process(pid).cmdline()) for pid in self.bed.processes(name)] for name in NAMES}
        return {name: [line for line in each if "mlxdist" in line] for name, each in lines.items()}

    def small_disk(self, name: str, size: str) -> str:
        """Mounts a disk of its own on a Mac, and returns its folder there."""
        folder = self.bed.folder / name / f"disk-{size}"
        folder.mkdir()
        self.bed.inside(name, "mount", "-t", "tmpfs", "-o", f"size={size},uid={UID}", "tmpfs", str(folder))
        return str(folder)


@contextmanager
def bed_cluster(model: Path) -> Iterator[BedCluster]:
    """A bed with a run of the tiny model, synced, for a block. Raises OSError where it cannot be made."""
    with TemporaryDirectory(prefix="mlxd-bed-") as name:
        folder = Path(name, "coordinator")
        folder.mkdir()
        folder.parent.chmod(0o755)  # the users of the Macs pass through it
        (folder / "run.toml").write_text(f'model = "{model}"\ndata = "train.jsonl"\n')
        (folder / "train.jsonl").write_text('{"text": "w1 w2 w3"}\n' * 8)
        with cluster_bed(folder.parent / "macs") as bed:
            for mac in NAMES:
                bed.run("ssh", mac, "true")  # fish writes into its home when it is first started
            made = BedCluster(bed, folder, {mac: files_in(bed.home(mac)) for mac in NAMES})
            done = made.mlxdist("sync", "--hosts", str(made.all()), internet=True)
            if done.returncode:
                raise OSError(f"the bed cannot be synced: {done.stdout}{done.stderr}")
            yield made


def files_in(folder: Path) -> set[str]:
    """Returns the names of everything in a folder, links not followed."""
    return {
        os.path.relpath(os.path.join(root, name), folder)
        for root, folders, files in os.walk(folder)
        for name in (*folders, *files)
    }
