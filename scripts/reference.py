"""Prints the reference of commands and settings as Markdown, from the code.

    python -m scripts.reference > docs/reference.md

A test fails when the page and the code differ.
"""

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import typer.main

from mlxdist.cli import app
from mlxdist.coordinator.config.field_types import allowed
from mlxdist.coordinator.config.keys import hints
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.protocol.methods import METHODS

EXAMPLE = Path(__file__).resolve().parents[1] / "run.example.toml"
HEAD = """# Reference

Made by `python -m scripts.reference` from the code; a test compares the two. `mlxdist COMMAND --help` shows the same.

## Commands
"""
SETTINGS = """
## Settings of a run

`run.example.toml` has these keys with their defaults, ready to copy. `--set KEY=VALUE` changes one for one run.

| key | default | takes | meaning |
|---|---|---|---|"""


def reference() -> str:
    """Returns the whole page."""
    return "\n".join([HEAD, *commands(), SETTINGS, *settings()]) + "\n"


def commands() -> Iterator[str]:
    """Yields the lines of every command that is not hidden."""
    group: Any = typer.main.get_command(app)
    for name in group.commands:
        command = group.commands[name]
        if command.hidden:
            continue
        yield from _command(f"mlxdist {name}", command)


def _command(title: str, command: Any) -> Iterator[str]:
    params = [each for each in command.params if not getattr(each, "hidden", False) and each.name != "help"]
    words = [_argument(each) for each in params if each.param_type_name == "argument"]
    yield f"### {' '.join([title, *words])}\n"
    yield f"{inspect.cleandoc(command.help or '')}\n"
    options = [each for each in params if each.param_type_name == "option"]
    if options:
        yield "| option | meaning |\n|---|---|"
        for option in options:
            value = "" if option.is_flag else f" {option.metavar or option.name.upper()}"
            yield f"| `{', '.join(option.opts)}{value}` | {_cell(option.help or '')} |"
        yield ""
    for name, inner in getattr(command, "commands", {}).items():
        yield from _command(f"{title} {name}", inner)


def _argument(param: Any) -> str:
    word = param.metavar or param.name.upper()
    return word if param.required or word.startswith("[") else f"[{word}]"


def settings() -> Iterator[str]:
    """Yields a line of the table for every key, in the order of the schema."""
    meanings, types, values = _meanings(), hints(), _defaults()
    for key in types:
        of_methods = [
            f"{name}: `{json.dumps(spec.defaults[key])}`" for name, spec in METHODS.items() if key in spec.defaults
        ]
        default = "; ".join([f"`{json.dumps(values[key], default=str)}`" if key in values else "", *of_methods])
        yield f"| `{key}` | {default.strip('; ')} | {_cell(allowed(types[key]))} | {_cell(meanings.get(key, ''))} |"


def _defaults() -> dict[str, Any]:
    """Returns the default of every key that has one; a key that is off by default has null."""
    made = RunConfig(model="", output=Path(), data=_with_path())
    found: dict[str, Any] = {}
    for field in fields(RunConfig):
        value = getattr(made, field.name)
        if is_dataclass(value):
            found |= {f"{field.name}.{inner.name}": getattr(value, inner.name) for inner in fields(value)}
        else:
            found[field.name] = value
    return {key: value for key, value in found.items() if key not in ("model", "output", "data.path")}


def _with_path() -> Any:
    from mlxdist.coordinator.config.schema import DataConfig

    return DataConfig(path="")


def _meanings() -> dict[str, str]:
    """Returns the meaning of each key, from the comments of run.example.toml and the lines that go on below them."""
    found: dict[str, str] = {}
    table, key = "", ""
    for line in EXAMPLE.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"\[(\w+)\]", line):
            table, key = f"{match[1]}.", ""
        elif match := re.match(r"(?:# )?(\w+) = (.*?\S)\s+# (.*)", line):
            key = f"{table}{match[1]}"
            found[key] = match[3]
        elif match := re.match(r"(?:# )?(\w+) = [^#]+$", line):
            key = f"{table}{match[1]}"
            found[key] = ""
        elif key and (match := re.match(r"#? {20,}#? *(\S.*)", line)):
            found[key] = f"{found[key]} {match[1].removeprefix('# ')}".strip()
        else:
            key = ""
    return found


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
