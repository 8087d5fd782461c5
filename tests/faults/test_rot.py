"""Files of a run that rot, are cut or swapped between two sessions: real runs are refused in one sentence, or go on."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.coordinator.storage.torn_files import TORN
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


def test_a_state_swapped_with_that_of_another_run_is_refused(base: Broken, broken: Broken) -> None:
    """The other run differs in its learning rate alone."""
    other = broken.output.with_name("other")
    sets = (f"output={other}", "train.learning_rate=2e-2")
    coordinator = base.launcher.start(base.run, sets=sets)
    assert coordinator.wait() == 0, coordinator.said.read_text()
    shutil.copy(other / "state/resume.safetensors", broken.output / "state")
    sentence = refused(*broken.resume())
    assert "that of another run (train.learning_rate was 0.02, is 0.01): --resume previous goes on" in sentence
    assert broken.resume(previous=True)[0] == 0
    assert sha(broken.output) == sha(base.output.with_name("longer"))


@pytest.mark.parametrize("name", ["config.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["text", "cut in half", "empty", "missing keys"])
def test_a_damaged_json_file_is_refused_and_after_its_removal_the_run_goes_on(
    name: str, damage: str, base: Broken, broken: Broken
) -> None:
    path = broken.output / name
    half = path.read_text()[: path.stat().st_size // 2]
    path.write_text({"text": "[]", "empty": "", "missing keys": '{"version": 1}', "cut in half": half}[damage])
    assert f"{path} cannot be used: it " in refused(*broken.resume())
    path.unlink()
    code, said = broken.resume()
    assert code == 0, said
    assert sha(broken.output) == sha(base.output.with_name("longer"))
    assert path.stat().st_size > 100


def test_lines_of_the_event_file_that_rotted_are_passed_over(base: Broken, broken: Broken) -> None:
    path = broken.output / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    numbers = [number for number, line in enumerate(lines) if b'"event": "train"' in line]
    lines[numbers[3]] = lines[numbers[3]].replace(b'"loss"', b'"lnss"')
    lines[numbers[4]] = b"\xff\xfe[]\n"
    path.write_bytes(b"".join(lines))
    code, said = broken.resume()
    assert code == 0, said
    assert [event["step"] for event in events(broken.output, "train")] == [1, 2, 3, *range(6, 17)]
    assert sha(broken.output) == sha(base.output.with_name("longer"))


@pytest.mark.parametrize("damage", ["header longer than the file", "tail cut", "offsets that overlap", "empty"])
@pytest.mark.parametrize("file", ["model", "adapter"])
def test_a_torn_model_or_adapter_is_refused_before_a_node_is_asked(
    file: str, damage: str, broken: Broken, model: Path, tmp_path: Path
) -> None:
    """The adapter that a new run starts from is that of the run."""
    if file == "model":
        torn, key = shutil.copytree(model, tmp_path / "model"), "model"
        path = torn / "model.safetensors"
    else:
        torn, key = broken.output, "lora.init_adapter"
        path = torn / "adapters.safetensors"
    path.write_bytes(TORN[damage])
    coordinator = broken.launcher.start(broken.run, sets=(f"output={tmp_path / 'new'}", f"{key}={torn}"))
    assert f"{path}" in refused(coordinator.wait(), coordinator.said.read_text())
    assert "reading" not in coordinator.said.read_text()


@pytest.mark.parametrize("damage", ["flipped bit", "cut", "gone"])
def test_a_damaged_reference_is_refused_before_a_node_is_asked(
    damage: str, launcher: Coordinators, model: Path, tmp_path: Path
) -> None:
    run, data = tmp_path / "run.toml", config_of(model, tmp_path / "none", "dpo").data.path
    text = RUN.format(model=model, data=data, output=tmp_path / "run").replace('"sft"', '"dpo"')
    run.write_text(f'{text}\n[preference]\nreference = "initial"\n')
    coordinator = launcher.start(run, sets=("train.steps=2",))
    assert coordinator.wait() == 0, coordinator.said.read_text()
    path = tmp_path / "run/state/reference.safetensors"
    whole = path.read_bytes()
    DAMAGES[damage](path)
    coordinator = launcher.start(run, resume=True, sets=("train.steps=3",))
    assert f"{path} cannot be used: " in refused(coordinator.wait(), coordinator.said.read_text())
    path.write_bytes(whole)
    coordinator = launcher.start(run, resume=True, sets=("train.steps=3",))
    assert coordinator.wait() == 0, coordinator.said.read_text()
