"""Small run.toml files, and what is said about faulty ones."""

import re
import tomllib
from pathlib import Path

import pytest

from mlxdist.coordinator.config.load import load_config
from mlxdist.protocol.errors import ConfigError

MINIMAL = 'model = "org/tiny"\ndata = "rows"\n'


def run_file(folder: Path, text: str) -> Path:
    """A run.toml in `folder`, beside an empty data folder; the needed keys come first unless `text` has its own."""
    (folder / "rows").mkdir(exist_ok=True)
    path = folder / "run.toml"
    path.write_text(text if "model" in text else MINIMAL + text)
    return path


def refusal(path: Path | None, *overrides: str) -> str:
    """What a refused configuration is told, the folder cut off."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value).replace(f"{path.parent}/" if path else "", "")


def example_values(path: Path) -> dict[str, dict[str, object]]:
    """Table -> key -> value of an example file, its commented keys taken as given."""
    found: dict[str, dict[str, object]] = {"": {}}
    table = ""
    for line in path.read_text().split("\n"):
        header = re.match(r"\[+(\w+)\]+", line)
        if header:
            table = header[1]
        elif re.match(r"(# )?\w+ = ", line):
            found.setdefault(table, {}).update(tomllib.loads(line.removeprefix("# ")))
    return found
