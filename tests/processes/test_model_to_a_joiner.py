"""A Mac with nothing but mlxdist joins by a code: no keys, no model, a home of its own; real processes, one machine."""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.faults.fault_runs import data_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

RUN = """
model = "test/tiny"
data = "{data}"
output = "{output}"
[batch]
size = 4
[lora]
rank = 4
[train]
steps = 2
eval_every = 0
"""
SNAPSHOT = Path(".cache/huggingface/hub/models--test--tiny/snapshots/0123abcd")


def put_into_hub_cache(home: Path, model: Path) -> None:
    """Puts a model into the hub's cache of a home, as a download does."""
    shutil.copytree(model, home / SNAPSHOT)
    refs = home / SNAPSHOT.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(SNAPSHOT.name)


@dataclass
class Macs:
    """Homes on this machine, and the commands that were typed in them."""

    folder: Path
    processes: "list[subprocess.Popen[str]]" = field(default_factory=list)

    def type(self, home: str, *words: str, typed: str = "") -> "subprocess.Popen[str]":
        """Types a command in a home."""
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
        (self.folder / home).mkdir(exist_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "mlxdist", *words],
            env={**plain, "HOME": str(self.folder / home), "MLXDIST_PLAIN": "1", "HF_HUB_OFFLINE": "1"},
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write(typed)
        process.stdin.close()
        self.processes.append(process)
        return process

    def launch(self, output: str, *words: str) -> "subprocess.Popen[str]":
        """Launches the run of this test, on the first Mac."""
        data = self.folder / "data"
        if not data.exists():
            data_folder(data, "sft")
        path = self.folder / f"{output}.toml"
        path.write_text(RUN.format(data=data, output=output))
        return self.type("first", "launch", str(path), *words)


@pytest.fixture
def macs(tmp_path: Path, model: Path) -> Iterator[Macs]:
    macs = Macs(tmp_path)
    put_into_hub_cache(tmp_path / "first", model)
    yield macs
    for process in macs.processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def until(process: "subprocess.Popen[str]", pattern: str) -> tuple[re.Match[str], str]:
    """Reads the lines of a command until one has the pattern. Returns the match and all that was read."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if found := re.search(pattern, line):
            return found, said
    raise AssertionError(f"{pattern!r} was not printed:\n{said}")


def test_a_mac_joins_from_nothing_and_gets_the_model_from_the_coordinator(macs: Macs, model: Path) -> None:
    hosts = macs.folder / "hosts.toml"
    hosts.write_text('nodes = []\n[coordinator]\nbind = "0.0.0.0"\nmin_nodes = 1\n')
    launch = macs.launch("joined", "--hosts", str(hosts), "--invite")
    found, _ = until(launch, r"type: mlxdist join \S+?(:\d+)?( .*)?\. The code there is (\S+),")
    joining = macs.type("second", "join", f"127.0.0.1{found[1] or ''}", "--name", "second", typed=f"{found[3]}\n")
    lines = threading.Thread(target=joining.stdout.read if joining.stdout else None, daemon=True)
    lines.start()
    _, said = until(launch, r"all 2 steps are done")
    assert launch.wait(60) == 0
    assert "it gets 0.1 MB from here" in said
    assert "the model is there; it is loaded" in said
    (copy,) = (macs.folder / "second/mlxdist/models").iterdir()
    assert {path.name for path in copy.iterdir() if not path.name.startswith(".")} == {p.name for p in model.iterdir()}
    joining.terminate()
    lines.join()
