"""The first run.toml: it loads, it fits the rows and the machine, and no file is ever overwritten."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from mlxdist.coordinator.config.load import load_config
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.data.load import read
from mlxdist.coordinator.memory.fit import Machine
from mlxdist.coordinator.starter.choose import Choice, choose
from mlxdist.coordinator.starter.show import sentences, write_first_run
from mlxdist.coordinator.starter.survey import Survey, suggested, survey
from mlxdist.coordinator.starter.write import toml_text
from mlxdist.protocol.errors import DataError, UserError

BIG = Machine(64 * 2**30, 60 * 2**30, "Darwin")


def rows_file(folder: Path, lengths: list[int], name: str = "train", **extra: object) -> Path:
    """Writes rows whose completions have so many words, and their template's few tokens."""
    folder.mkdir(exist_ok=True)
    rows = [{"prompt": "w1", "completion": " ".join(["w2"] * length), **extra} for length in lengths]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chosen(data: Path, model: Path | str, machine: Machine = BIG) -> tuple[Survey, Choice, RunConfig]:
    """Returns the survey and the choice, and the configuration as `launch` reads it from the written file."""
    seen = survey(str(data), str(model), machine, lambda message, share: None)
    choice = choose(seen, machine)
    file = data.parent / "run.toml"
    file.write_text(toml_text(seen, choice, file))
    return seen, choice, load_config(file)


def test_the_file_says_what_was_chosen_and_its_rows_can_be_read(model: Path, tmp_path: Path) -> None:
    data = rows_file(tmp_path / "data", [*range(1, 101), 400]).parent
    rows_file(data, [3, 4], "valid")
    seen, choice, config = chosen(data, model)
    assert (config.batch, config.train, config.data) == (choice.config.batch, choice.config.train, choice.config.data)
    assert config.data.path == str(data)
    assert 'path = "data"' in (tmp_path / "run.toml").read_text()
    assert sum(length > config.batch.max_length for length in seen.lengths) == choice.cut == 1  # 99 % fit, not all
    assert config.batch.max_length < 130
    assert (config.data.valid_fraction, config.train.epochs, choice.steps) == (0.0, 3.0, 36)
    dataset = read(config, progress=lambda message, share: None)
    assert (len(dataset.train), len(dataset.valid or ())) == (101, 2)


@pytest.mark.parametrize(("count", "kept"), [(10, 0.0), (200, 0.1), (1200, 0.05)])
def test_rows_are_kept_back_where_there_is_no_validation_file_and_enough_rows(
    count: int, kept: float, model: Path, tmp_path: Path
) -> None:
    _, choice, config = chosen(rows_file(tmp_path / "data", [5] * count), model)
    assert config.data.valid_fraction == kept
    assert 8 <= config.train.eval_every * 10 <= choice.steps + 9


@pytest.mark.parametrize(
    ("row", "method"),
    [
        ({"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]}, "sft"),
        ({"text": "w1 w2"}, "sft"),
        ({"prompt": "w1", "chosen": " w2", "rejected": " w3"}, "dpo"),
        ({"prompt": "w1", "completion": " w2", "label": True}, "kto"),
    ],
)
def test_the_method_is_the_one_of_the_rows_form(
    row: dict[str, object], method: str, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 30)
    _, _, config = chosen(tmp_path / "rows.jsonl", model)
    assert config.method == method
    assert config.train.learning_rate == (2e-4 if method == "sft" else 5e-5)


@pytest.mark.parametrize(
    ("desirable", "weights"), [(10, (3.0, 1.0)), (30, (1.0, 3.0)), (20, (1.0, 1.0)), (18, (1.22, 1.0))]
)
def test_labels_of_unequal_number_are_balanced(
    desirable: int, weights: tuple[float, float], model: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": "w1", "completion": f" w{n}", "label": n < desirable} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, _, config = chosen(tmp_path / "rows.jsonl", model)
    assert (config.preference.desirable_weight, config.preference.undesirable_weight) == weights


def test_rows_that_do_not_fit_into_this_machine_shorten_the_length(model: Path, tmp_path: Path) -> None:
    data = rows_file(tmp_path / "data", [6000] * 30)
    _, choice, config = chosen(data, model)
    assert (choice.limited, config.batch.max_length, choice.cut) == (False, 6016, 0)
    small = Machine(510 * 10**6, 500 * 10**6, "Linux")
    seen, choice, config = chosen(data, model, small)
    assert choice.limited
    assert 32 <= config.batch.max_length < 6000
    assert config.batch.max_cut == 1.0  # every row is longer, and the file says so
    assert "what fits on this machine" in (data.parent / "run.toml").read_text()
    assert "the most that this machine holds" in next(
        s for s in sentences(seen, choice, Path("run.toml")) if "fits" in s
    )
    with pytest.raises(UserError, match="too large for this machine"):
        chosen(data, model, Machine(300 * 10**6, 300 * 10**6, "Linux"))


def test_without_a_model_one_is_suggested_and_lengths_are_estimates(tmp_path: Path) -> None:
    data = rows_file(tmp_path / "data", [100] * 25)
    seen, choice, config = chosen(data, "")
    assert config.model == suggested(BIG)
    assert suggested(Machine(8 * 2**30, 0, "Darwin")) != suggested(BIG)
    assert 96 <= config.batch.max_length <= 160  # 300 characters
    assert "estimated from characters" in list(sentences(seen, choice, Path("run.toml")))[1]


def test_it_says_three_lines_and_names_the_first_faulty_row(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rows_file(tmp_path / "data", [5] * 30)
    monkeypatch.chdir(tmp_path)
    write_first_run("data/train.jsonl", str(model), Path("run.toml"), Console(width=200))
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3
    assert said[-1] == "Next: mlxdist inspect run.toml, then mlxdist launch run.toml"
    with data.open("a") as lines:
        lines.write('{"prompt": "w1", "completion": 5}\n')
    write_first_run("data/train.jsonl", str(model), Path("second.toml"), Console(width=200))
    assert "1 row of 31 cannot be trained on, the first: train.jsonl:31" in capsys.readouterr().out
    assert "on_bad_row" in Path("second.toml").read_text()


def test_a_file_that_exists_stays_and_data_that_is_none_is_refused(model: Path, tmp_path: Path) -> None:
    data, file = rows_file(tmp_path / "data", [5] * 30), tmp_path / "run.toml"
    file.write_text("mine")
    with pytest.raises(UserError, match="never overwritten"):
        write_first_run(str(data), str(model), file, Console())
    assert file.read_text() == "mine"
    with pytest.raises(UserError, match="there is no file or folder"):
        write_first_run(str(tmp_path / "nowhere.jsonl"), str(model), tmp_path / "new.toml", Console())
    data.write_text('{"other": 1}\n')
    with pytest.raises(DataError, match=r"no row that can be trained on: train\.jsonl:1"):
        write_first_run(str(data), str(model), tmp_path / "new.toml", Console())
    assert not (tmp_path / "new.toml").exists()
