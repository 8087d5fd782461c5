"""run.toml and --set become a resolved RunConfig, and a file that cannot be read becomes a sentence."""

import dataclasses
import json
from pathlib import Path

import pytest

from mlxdist.coordinator.config.keys import flat, hints
from mlxdist.coordinator.config.load import load_config
from mlxdist.coordinator.config.schema import SECRET, TrainConfig, as_json, warmup_steps
from tests.coordinator.config.run_files import MINIMAL, refusal, run_file

# --- what a correct file becomes


def test_model_and_data_are_enough(tmp_path: Path) -> None:
    config = load_config(run_file(tmp_path, ""))
    assert config.model == "org/tiny"
    assert config.data.path == str(tmp_path / "rows")
    assert config.output == tmp_path / "runs" / "run"
    assert (config.method, config.train.steps, config.batch.size, config.lora.rank) == ("sft", 100, 8, 8)


@pytest.mark.parametrize("method", ["sft", "dpo", "kto", "orpo"])
def test_each_method_has_its_own_defaults(tmp_path: Path, method: str) -> None:
    config = load_config(run_file(tmp_path, f'method = "{method}"\nmodel = "m"\ndata = "rows"'))
    train, order = config.train, config.batch.order
    if method == "sft":
        assert (train.learning_rate, train.schedule, train.warmup_steps, order) == (2e-4, "constant", 0, "sorted")
    else:
        assert (train.learning_rate, train.schedule, train.warmup_steps, order) == (5e-5, "cosine", "auto", "shuffled")
        assert config.preference.loss == {"dpo": "sigmoid", "kto": "kto", "orpo": "orpo"}[method]
        assert warmup_steps(train, 100) == 10


def test_a_given_value_beats_the_default_of_the_method(tmp_path: Path) -> None:
    text = MINIMAL + 'method = "dpo"\n[train]\nlearning_rate = 1\nwarmup_steps = 0\nschedule = "linear"'
    config = load_config(run_file(tmp_path, text))
    assert (config.train.learning_rate, config.train.warmup_steps, config.train.schedule) == (1.0, 0, "linear")
    assert isinstance(config.train.learning_rate, float)


def test_an_automatic_warmup_is_a_tenth_rounded_up_and_a_number_stays() -> None:
    assert [warmup_steps(TrainConfig(warmup_steps="auto"), steps) for steps in (1, 10, 11, 100)] == [1, 1, 2, 10]
    assert warmup_steps(TrainConfig(warmup_steps=7), 100) == 7


@pytest.mark.parametrize("key", ["epochs", "max_hours"])
def test_epochs_or_hours_replace_the_default_steps(tmp_path: Path, key: str) -> None:
    config = load_config(run_file(tmp_path, f"[train]\n{key} = 2"))
    assert (config.train.steps, getattr(config.train, key)) == (None, 2.0)


def test_the_short_form_of_data_is_the_path_of_its_table(tmp_path: Path) -> None:
    long = load_config(run_file(tmp_path, 'model = "org/tiny"\n[data]\npath = "rows"'))
    assert load_config(run_file(tmp_path, "")) == long


def test_paths_are_relative_to_the_file_and_home_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("elsewhere", "home", "runs/models/base", "runs/rows", "runs/start"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("adapter_config.json", "adapters.safetensors"):
        (tmp_path / "runs/start" / name).touch()
    (tmp_path / "home" / "valid.jsonl").touch()
    file = tmp_path / "runs" / "my-pairs.toml"
    file.write_text(
        'model = "models/base"\ndata.path = "./rows"\ndata.valid_path = "~/valid.jsonl"\nlora.init_adapter = "start"'
    )
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = load_config(Path("../runs/my-pairs.toml"))
    assert config.model == str(tmp_path / "runs/models/base")
    assert config.data.path == str(tmp_path / "runs/rows")
    assert config.data.valid_path == str(tmp_path / "home/valid.jsonl")
    assert config.lora.init_adapter == str(tmp_path / "runs/start")
    assert config.output == tmp_path / "runs/runs/my-pairs"
    assert load_config(file, ["output=out"]).output == tmp_path / "elsewhere" / "out", (
        "typed paths start where they are typed"
    )


def test_a_folder_and_nothing_at_all_mean_run_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load_config(run_file(tmp_path, ""))
    assert load_config(tmp_path) == expected
    monkeypatch.chdir(tmp_path)
    assert load_config(None) == expected


def test_json_keeps_nulls_and_has_paths_as_text(tmp_path: Path) -> None:
    config = load_config(
        run_file(tmp_path, 'model = "m"\ndata.path = "rows"\ndata.columns = {prompt = "q"}\n[train]\nepochs = 1'),
    )
    said = json.loads(json.dumps(as_json(config), allow_nan=False))
    assert said["train"]["steps"] is None
    assert said["output"] == str(tmp_path / "runs/run")
    assert said["train"]["betas"] == [0.9, 0.999]
    assert said["data"]["columns"] == {"prompt": "q"}
    assert {key for key, _ in flat(said)} == set(hints()) - set(SECRET)


def test_a_configuration_cannot_be_changed(tmp_path: Path) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config(run_file(tmp_path, "")).train.steps = 3  # type: ignore[misc]


# --- overrides


def test_overrides_take_toml_values_dotted_keys_and_bare_words(tmp_path: Path) -> None:
    path = run_file(tmp_path, 'model = "m"\ndata.path = "rows"\ndata.columns = {prompt = "q"}\n[train]\nsteps = 100')
    texts = [
        "train.steps=5",
        "method=kto",
        "lora.target_modules=['q_proj']",
        "train.betas=[0.5, 0.9]",
        "batch.seed = 7",
    ]
    config = load_config(path, [*texts, "data.columns.completion=a", "train.report_memory=true"])
    assert (config.train.steps, config.method, config.batch.seed) == (5, "kto", 7)
    assert config.lora.target_modules == ("q_proj",)
    assert config.train.betas == (0.5, 0.9)
    assert config.data.columns == {"prompt": "q", "completion": "a"}
    assert config.train.report_memory is True


def test_a_bare_word_that_looks_like_a_date_is_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(run_file(tmp_path, ""), ["output=2025-01-31"]).output == tmp_path / "2025-01-31"


def test_an_override_replaces_the_alternative_in_the_file(tmp_path: Path) -> None:
    train = load_config(run_file(tmp_path, "[train]\nsteps = 50"), ["train.epochs=0.5"]).train
    assert (train.steps, train.epochs) == (None, 0.5)


def test_a_value_that_an_override_replaces_is_not_checked(tmp_path: Path) -> None:
    assert load_config(run_file(tmp_path, 'model = "./gone"\ndata = "rows"'), ["model=org/here"]).model == "org/here"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.stepz=5", "--set train.stepz is not a key of [train]; the nearest is train.steps"),
        ("steps=5", "--set steps is not a key: steps belongs in [train]"),
        ("train.steps=many", '--set train.steps = "many": must be a whole number, at least 1'),
        ("train.steps", "--set train.steps has no value: write --set train.steps=value"),
        ("=5", "--set =5 has no key: write --set train.steps=5"),
        ("train=5", "--set train = 5: must be a table, [train]"),
        ("train.report_memory=True", '--set train.report_memory = "True": must be true or false'),
        (
            "lora.target_modules=q_proj",
            '--set lora.target_modules = "q_proj": must be a list of texts, like ["one", "two"], or "all-linear"',
        ),
        ("method=dop", '--set method = "dop": must be "sft", "dpo", "kto" or "orpo"; did you mean "dpo"?'),
        ("train.steps.x=1", '--set train.steps = {"x": 1}: must be a whole number, at least 1'),
    ],
)
def test_a_faulty_override_is_named_as_typed(tmp_path: Path, override: str, said: str) -> None:
    assert refusal(run_file(tmp_path, ""), override) == said


# --- files that cannot be read


def test_a_missing_file_is_named_with_its_nearest_neighbor(tmp_path: Path) -> None:
    path = run_file(tmp_path, "")
    assert refusal(path.with_name("runn.toml")) == "runn.toml: there is no such file; did you mean run.toml?"
    (tmp_path / "empty").mkdir()
    assert "there is no run.toml in this folder; write one" in refusal(tmp_path / "empty")


def test_no_file_and_no_run_toml_here_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(None).startswith(f"{tmp_path}: there is no run.toml in this folder; write one")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('model = "m"\nsteps 5', "2:7"),
        ('model = "m', "1:11"),
        ('model = "m"\nmodel = "n"', "2:12"),
        ("model = “m”", "1:9"),
    ],
)
def test_broken_toml_is_shown_with_line_and_column(tmp_path: Path, text: str, place: str) -> None:
    said = refusal(run_file(tmp_path, text))
    assert said.startswith(f"run.toml:{place}: is not TOML: ")
    assert ("typographic quotes" in said) == ("“" in text)
    assert said.endswith(text.split("\n")[int(place[0]) - 1])


def test_a_byte_order_mark_and_windows_lines_are_read_and_other_encodings_are_refused(tmp_path: Path) -> None:
    path = run_file(tmp_path, "")
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert load_config(path).model == "org/tiny"
    path.write_bytes(b'model = "m"\n# caf\xe9\n')
    assert refusal(path) == "run.toml:2: is not UTF-8 text; save the file as UTF-8"


def test_what_is_needed_is_asked_for(tmp_path: Path) -> None:
    said = refusal(run_file(tmp_path, '# model\nmethod = "sft"'))
    assert "run.toml: model is missing: a folder or hub id" in said
    assert "run.toml: data is missing: the rows to train on" in said
