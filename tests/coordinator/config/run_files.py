"""Small run.toml files, and the messages about faulty ones."""

import re
import tomllib
from pathlib import Path

import pytest

from mlxdist.coordinator.config.load import load_config
from mlxdist.protocol.errors import ConfigError

MINIMAL = 'model = "org/tiny"\ndata = "rows"\n'


def run_file(folder: Path, text: str) -> Path:
    """Writes a run.toml into `folder`, beside an empty data folder, with the required keys unless `text` has them."""
    (folder / "rows").mkdir(exist_ok=True)
    path = folder / "run.toml"
    path.write_text(text if "model" in text else MINIMAL + text)
    return path


def refusal(path: Path | None, *overrides: str) -> str:
    """Returns the message of a refused configuration, without the folder."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value).replace(f"{path.parent}/" if path else "", "")


def example_values(path: Path) -> dict[str, dict[str, object]]:
    """Returns table -> key -> value of an example file, with its commented keys."""
    found: dict[str, dict[str, object]] = {"": {}}
    table = ""
    for line in path.read_text().split("\n"):
        header = re.match(r"\[+(\w+)\]+", line)
        if header:
            table = header[1]
        elif re.match(r"(# )?\w+ = ", line):
            found.setdefault(table, {}).update(tomllib.loads(line.removeprefix("# ")))
    return found
