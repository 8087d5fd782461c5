"""The runs in examples/ load as they are, and their rows pass `inspect` and agree with the comments."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from mlxdist.coordinator.config.load import load_config
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.data.load import read
from mlxdist.coordinator.inspect.inspect import InspectOptions, show_inspection
from tests.coordinator.data.bpe_tokenizer import save_tokenizer
from tests.processes.real_model import smollm2

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
METHODS = ("sft", "dpo", "kto")


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def loaded(method: str, *overrides: str) -> RunConfig:
    return load_config(EXAMPLES / method / "run.toml", overrides)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("method", METHODS)
def test_an_example_loads_and_every_row_of_it_can_be_trained(method: str, tokenizer: Path) -> None:
    # the small tokenizer of the tests gives more tokens per row than that of the example's model
    config = loaded(method, f"model={tokenizer}", "batch.max_length=1024")
    assert config.method == method
    data = read(config, progress=lambda message, share: None)
    steps_of_an_epoch = re.search(r"(\d+) (?:rows|pairs) are (\d+) steps an epoch", text_of(method))
    assert steps_of_an_epoch is not None
    assert len(data.train) == int(steps_of_an_epoch[1]) == int(steps_of_an_epoch[2]) * config.batch.size
    assert data.valid is not None
    assert len(data.valid)
    assert not [note for note in data.notes if "cut" in note or "left out" in note]


@pytest.mark.parametrize("method", METHODS)
def test_an_example_passes_inspect(method: str, tokenizer: Path) -> None:
    options = InspectOptions(max_length=1024, overrides=(f"model={tokenizer}",))
    assert show_inspection(str(EXAMPLES / method / "run.toml"), "", options, quiet()) == 0


@pytest.mark.parametrize("method", METHODS)
def test_an_example_names_the_commands_of_the_readme(method: str) -> None:
    command = f"mlxdist launch examples/{method}/run.toml"
    assert command in text_of(method)
    if method != "sft":  # the quickstart runs that one
        assert command in (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")


def test_the_two_runs_of_sft_then_dpo_read_the_pairs_of_dpo(tokenizer: Path) -> None:
    folder = EXAMPLES / "sft-then-dpo"
    first = load_config(folder / "1-sft.toml", (f"model={tokenizer}", "batch.max_length=1024"))
    data = read(first, progress=lambda message, share: None)
    assert len(data.train) == 10 * first.batch.size  # as its comment says
    second = (folder / "2-dpo.toml").read_text(encoding="utf-8")
    assert 'init_adapter = "../../runs/example-first-sft"' in second
    assert first.output.name == "example-first-sft"
    assert "mlxdist launch examples/sft-then-dpo/2-dpo.toml" in (EXAMPLES.parent / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize("method", METHODS)
def test_an_example_passes_inspect_with_its_own_model(method: str) -> None:
    smollm2()
    out = io.StringIO()
    assert show_inspection(str(EXAMPLES / method / "run.toml"), "", InspectOptions(), Console(file=out, width=200)) == 0
    assert out.getvalue().count("cut: 0 rows") == 2


def text_of(method: str) -> str:
    return (EXAMPLES / method / "run.toml").read_text(encoding="utf-8")
