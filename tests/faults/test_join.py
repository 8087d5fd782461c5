"""Macs that join by a code, as people do it: by the commands, between network namespaces, from no key to a training."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue

import pytest

from mlxdist.coordinator.config.hosts import local_hosts
from mlxdist.coordinator.run import run
from tests.faults.fault_runs import config_of, sha
from tests.faults.namespaces import COORDINATOR, OfficeNodes, office_nodes, why_not

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
WAIT = 60.0  # for a line that a command prints


@pytest.fixture
def macs(tmp_path: Path) -> Iterator[OfficeNodes]:
    """A coordinator and three Macs, with no key and nothing running."""
    if reason := why_not():
        pytest.skip(reason)
    with office_nodes(tmp_path, others=("a", "b", "c")) as macs:
        yield macs


@dataclass
class Typed:
    """A command that was typed on a Mac, and what it prints, line by line."""

    process: "subprocess.Popen[str]"
    lines: Queue[str] = field(default_factory=Queue)
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                self.lines.put(line)
        self.lines.put("")

    def until(self, pattern: str) -> re.Match[str]:
        """Waits for a line in which the pattern is found."""
        for line in self.said:
            if found := re.search(pattern, line):
                return found
        with suppress(Empty):
            while line := self.lines.get(timeout=WAIT):
                self.said.append(line)
                if found := re.search(pattern, line):
                    return found
        raise AssertionError(f"{pattern!r} was not printed:\n{''.join(self.said)}")

    def ends(self) -> int:
        code = self.process.wait(WAIT)
        while line := self.lines.get(timeout=WAIT):
            self.said.append(line)
        return code


@dataclass
class Desk:
    """The commands of one test, ended after it."""

    macs: OfficeNodes
    folder: Path
    model: Path
    typed: list[Typed] = field(default_factory=list)

    def type(self, where: str, *words: str, code: str = "") -> Typed:
        """Types a command on a Mac, with a code on its standard input."""
        place = self.macs.office.node(where) if where != "coordinator" else self.macs.office.coordinator
        process = subprocess.Popen(
            ["ip", "netns", "exec", place, sys.executable, "-m", "mlxdist", *words],
            env={**self.macs.environment(where), "MLXDIST_PLAIN": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write(code + "\n")
        process.stdin.close()
        self.typed.append(Typed(process))
        return self.typed[-1]

    def launch(self, *words: str, steps: int = 6) -> Typed:
        """Types `mlxdist launch` on the coordinator, which waits for as many nodes as a test needs."""
        config = config_of(self.model, self.folder / "run", "sft", steps=steps)
        lines = [
            f'model = "{config.model}"\noutput = "run"\ndata = "{config.data.path}"\n[batch]\nsize = 8',
            f"[lora]\nrank = 4\n[train]\nsteps = {steps}\nlearning_rate = 1e-2\neval_every = 0\nsave_every = 1",
        ]
        (self.folder / "run.toml").write_text("\n".join(lines))
        return self.type("coordinator", "launch", str(self.folder / "run.toml"), *words)

    def hosts(self, min_nodes: int) -> str:
        """Returns a hosts.toml without nodes of its own: all join, and the run waits for so many."""
        path = self.folder / "hosts.toml"
        path.write_text(f"nodes = []\n[coordinator]\nmin_nodes = {min_nodes}\n")
        return str(path)

    def one_machine(self) -> str:
        """Returns the SHA-256 of the adapter of the same run on one machine."""
        assert (
            run(
                config_of(self.model, self.folder / "alone", "sft"),
                local_hosts(1),
                resume=False,
                environ={"MLXDIST_PLAIN": "1"},
            )
            == 0
        )
        return sha(self.folder / "alone")

    def end(self) -> None:
        for typed in self.typed:
            typed.process.terminate()
            typed.process.wait()
            typed.reader.join()


@pytest.fixture
def desk(macs: OfficeNodes, model: Path, tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(macs, tmp_path, model)
    yield desk
    desk.end()


def test_two_macs_join_by_a_code_and_the_bits_are_those_of_one_machine(desk: Desk) -> None:
    """One by a wrong code first; then a run that needs no code, a Mac that is forgotten, and one that comes later."""
    launch = desk.launch("--hosts", desk.hosts(2), "--invite", "2")
    (code,) = launch.until(r"The code there is (\d{4}-\d{4}), for 5 minutes").groups()
    wrong = desk.type("a", "join", COORDINATOR, code="0000-0001")
    assert wrong.ends() == 2
    wrong.until("the codes differ")
    launch.until(r"10\.77\.0\.\d tried to join without the right code: 4 of 5")
    first = desk.type("a", "join", COORDINATOR, "--name", "a", code=code)
    first.until("keys were exchanged: this Mac is a there")
    second = desk.type("b", "join", COORDINATOR, "--name", "a", code=code.replace("-", " "))
    second.until("keys were exchanged: this Mac is a-2 there")
    assert desk.type("c", "join", COORDINATOR, code=code).ends() == 2, "the code was for two"
    assert launch.ends() == 0, launch.said
    assert sha(desk.folder / "run") == desk.one_machine()
    assert code not in "".join(path.read_text(errors="replace") for path in (desk.folder / "run").rglob("*.json*"))


def test_a_mac_joins_a_running_run_and_the_next_one_without_a_code_until_it_is_forgotten(desk: Desk) -> None:
    """Two Macs are needed throughout, so that the run waits for each of them."""
    words = ("--hosts", desk.hosts(2))
    launch = desk.launch(*words, "--invite", steps=3)
    (code,) = launch.until(r"The code there is (\S+),").groups()
    desk.type("a", "join", COORDINATOR, "--name", "one", code=code).until("keys were exchanged: this Mac is one there")
    launch.until("one: connected")
    again = desk.launch(*words, "--invite", steps=3)
    (code,) = again.until(r"The code there is (\S+),").groups()
    desk.type("b", "join", COORDINATOR, "--name", "two", code=code).until("keys were exchanged: this Mac is two there")
    assert again.ends() == 0
    assert launch.ends() == 0
    listed = desk.type("coordinator", "nodes")
    assert listed.until(r"two +20\S+ +20\S+ \S+ .* [0-9a-f]{8} ")
    assert listed.ends() == 0
    desk.typed[1].process.terminate()
    desk.type("a", "join").until(f"works for {COORDINATOR}:7550, as one")
    launch = desk.launch(*words, "--invite", "0", "--set", f"output={desk.folder}/next", steps=10_000)
    launch.until("step 1 of")
    assert desk.type("coordinator", "nodes", "forget", "two").ends() == 0
    launch.until("two: .*turned away: its key was taken off the list")
    desk.typed[3].until("refused: its key was taken off the list")
    assert desk.typed[3].ends() == 1
    launch.process.terminate()
    assert launch.ends() == 130
