"""Files of a run that rot, are cut or swapped between two sessions: real runs are refused in one sentence, or go on."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.fault_runs import config_of, events, sha
from tests.faults.forked_coordinator import Coordinators
from tests.faults.test_disk_full import RUN, STEPS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@dataclass(frozen=True)
class Broken:
    """A copy of a whole run, to be damaged and resumed."""

    launcher: Coordinators
    run: Path  # run.toml
    output: Path

    def resume(self, *, previous: bool = False, sets: tuple[str, ...] = ()) -> tuple[int, str]:
        """Resumes it, and returns the exit code and everything that was printed."""
        sets = (f"output={self.output}", "train.steps=16", *sets)
        coordinator = self.launcher.start(self.run, resume=True, previous=previous, sets=sets)
        return coordinator.wait(), coordinator.said.read_text()


@pytest.fixture(scope="module")
def base(launcher: Coordinators, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Broken:
    """A whole run of 14 steps, and what it would have been with 16."""
    folder = tmp_path_factory.mktemp("rot")
    run, data = folder / "run.toml", config_of(model, folder / "none", "sft").data.path
    run.write_text(RUN.format(model=model, data=data, output=folder / "run"))
    for name, steps in (("run", STEPS), ("longer", 16)):
        coordinator = launcher.start(run, sets=(f"output={folder / name}", f"train.steps={steps}"))
        assert coordinator.wait() == 0, coordinator.said.read_text()
    return Broken(launcher, run, folder / "run")


@pytest.fixture
def broken(base: Broken, tmp_path: Path) -> Broken:
    """A copy of the whole run."""
    shutil.copytree(base.output, tmp_path / "run", symlinks=True)
    return Broken(base.launcher, base.run, tmp_path / "run")


def flip(path: Path) -> None:
    """Flips one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    """Cuts the last byte off."""
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped bit": flip,
    "cut": cut,
    "empty": lambda path: path.write_bytes(b""),
    "gone": Path.unlink,
    "text": lambda path: path.write_text("[]"),
}


def refused(code: int, said: str) -> str:
    """Asserts one sentence, exit 2, and that no node was asked for anything; returns the sentence."""
    assert code == 2, said
    assert "Traceback" not in said
    assert "loading" not in said
    sentences = [line for line in said.splitlines() if line.startswith("mlxdist: ")]
    assert said.rstrip("\n").endswith(sentences[0])
    assert len(sentences) == 1
    return sentences[0]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_refused_and_the_previous_one_ends_with_the_same_bits(
    damage: str, base: Broken, broken: Broken
) -> None:
    DAMAGES[damage](broken.output / "state/resume.safetensors")
    sentence = refused(*broken.resume())
    assert "--resume previous goes on from the state saved before it, after step 13" in sentence
    code, said = broken.resume(previous=True)
    assert code == 0, said
    assert sha(broken.output) == sha(base.output.with_name("longer"))
    assert [event["step"] for event in events(broken.output, "train")] == list(range(1, 17))
