"""run.example.toml shows every key with its real default; any text and any value is read without a crash."""

import json
import re
import tomllib
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxdist.coordinator.config.keys import hints
from mlxdist.coordinator.config.load import load_config
from mlxdist.coordinator.config.toml_file import key_lines
from mlxdist.protocol.errors import ConfigError
from mlxdist.protocol.methods import METHODS
from tests.coordinator.config.run_files import MINIMAL, example_values, run_file

EXAMPLE = Path(__file__).parents[3] / "run.example.toml"


# --- the example, and the small readers


def test_the_example_loads_as_a_run_with_every_default(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    copy = tmp_path / "run.toml"
    copy.write_text(EXAMPLE.read_text())
    plain = tmp_path / "plain.toml"
    plain.write_text('model = "mlx-community/SmolLM2-135M-Instruct"\ndata = "data"\noutput = "runs/run"')
    assert load_config(copy) == load_config(plain)


def test_the_example_shows_every_key_with_its_real_default(tmp_path: Path) -> None:
    shown = {
        f"{table}.{key}".strip("."): value
        for table, keys in example_values(EXAMPLE).items()
        for key, value in keys.items()
    }
    assert set(shown) == set(hints())
    (tmp_path / "data").mkdir()
    plain = tmp_path / "run.toml"
    plain.write_text('model = "mlx-community/SmolLM2-135M-Instruct"\ndata = "data"')
    config = load_config(plain)
    real = {key: attrgetter(key)(config) for key in hints()}
    assert real["output"] == tmp_path / shown.pop("output")
    assert real["data.path"] == str(tmp_path / shown.pop("data.path"))
    assert shown.pop("train.epochs") is not None
    assert shown.pop("train.max_hours") is not None
    for key, value in shown.items():
        assert real[key] == (tuple(value) if isinstance(value, list) else value), key


def test_the_example_names_every_method_and_every_loss() -> None:
    words = set(re.findall(r"\w+", EXAMPLE.read_text()))
    assert {name for spec in METHODS.values() for name in (spec.name, *spec.losses)} <= words


def test_the_defaults_of_every_method_are_keys_and_fit_them(tmp_path: Path) -> None:
    for method, spec in METHODS.items():
        defaults = spec.defaults
        sets = [f"{key}={json.dumps(value)}" for key, value in defaults.items()]
        config = load_config(run_file(tmp_path, ""), [f"method={method}", *sets])
        assert all(attrgetter(key)(config) == value for key, value in defaults.items())


def test_lines_are_found_through_long_strings_lists_and_comments() -> None:
    lines = ['a = """', "b = 1", '"""', "# c = 1", "d = [", "  'x = 1', # [", "  2,", "]"]
    lines += ["[t] # note", "'e' = \"[\"", "f.g = {h = 1}", "[[n]]", "i = 1", "[[n]]", "j = '''x''' # '''", "k = 2"]
    text = "\n".join(lines)
    assert tomllib.loads(text)["n"] == [{"i": 1}, {"j": "x", "k": 2}]
    top = {"a": 1, "d": 5, "t": 9, "t.e": 10, "t.f": 11, "t.f.g": 11, "t.f.g.h": 11}
    assert key_lines(text) == {**top, "n": 12, "n.0": 12, "n.0.i": 13, "n.1": 14, "n.1.j": 15, "n.1.k": 16}


@given(st.text(max_size=60))
def test_any_text_is_read_for_lines_without_a_crash(text: str) -> None:
    assert all(1 <= line <= text.count("\n") + 1 for line in key_lines(text).values())


@given(
    st.sampled_from(sorted(hints())),
    st.text(max_size=20) | st.integers() | st.floats() | st.booleans() | st.lists(st.integers(), max_size=3),
)
def test_any_value_is_taken_or_refused_with_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: object
) -> None:
    path = tmp_path_factory.getbasetemp() / "any" / "run.toml"
    if not path.exists():
        (path.parent / "rows").mkdir(parents=True)
        path.write_text(MINIMAL)
    try:
        said = str(load_config(path, [f"{key}={json.dumps(value)}"]))
    except ConfigError as error:
        said = str(error)
    assert said.startswith(("RunConfig(", f"--set {key} ", f"--set {key}: "))
