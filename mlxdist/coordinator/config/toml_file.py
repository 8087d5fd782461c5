"""Reads a TOML file written by a person, and says where its faults are.

tomllib gives values without lines, so the lines of the keys are found by a second, forgiving look at the text.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxdist.protocol.errors import ConfigError, NotYetError

FAULTS_SHOWN = 10

_PART = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_DOTTED = rf"{_PART}(?:\s*\.\s*{_PART})*"
_HEADER = re.compile(rf"\s*(\[\[?)\s*({_DOTTED})\s*\]")
_ASSIGNMENT = re.compile(rf"\s*({_DOTTED})\s*=(.*)", re.DOTALL)
# strings and comments hide brackets; a long string may stay open to the next line
_TOKEN = re.compile(
    r""""{3}.*?"{3}|'{3}.*?'{3}|(?P<open>"{3}|'{3})|"(?:\\.|[^"\\])*"|'[^']*'|#.*|(?P<bracket>[][{}])"""
)
CURLY = re.compile("[\u2018-\u201f]")
_PLACE = re.compile(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)$")


@dataclass(frozen=True)
class Fault:
    """One thing to mend: the whole sentence, its place in front."""

    text: str
    not_yet: bool = False


@dataclass(frozen=True)
class TomlFile:
    """A file's values, and the line (from 1) of each dotted key. Tables of an array count from 0: nodes.0.host."""

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[str, int] = field(default_factory=dict)

    def place(self, key: str) -> str:
        """`run.toml:12: batch.size`; a key without a line of its own has its table's, or none."""
        parts = key.split(".")
        name = ".".join(part for part in parts if not part.isdecimal())
        for end in range(len(parts), 0, -1):
            line = self.lines.get(".".join(parts[:end]))
            if line is not None:
                return f"{self.path}:{line}: {name}"
        return f"{self.path}: {name}"


def read(path: Path) -> TomlFile:
    """The file at `path`. Raises ConfigError when it cannot be read or is not TOML, with file:line:column."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: is not UTF-8 text; save the file as UTF-8") from error
    text = text.replace("\r\n", "\n")
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_not_toml(path, text, str(error))) from error
    return TomlFile(path, values, key_lines(text))


def _not_toml(path: Path, text: str, message: str) -> str:
    found = _PLACE.search(message)
    rows = text.split("\n")
    line, column = (int(found[1]), int(found[2])) if found and found[1] else (len(rows), len(rows[-1]) + 1)
    row = rows[line - 1]
    curly = "; it has typographic quotes where TOML takes straight ones" if CURLY.search(row) else ""
    return f"{path}:{line}:{column}: is not TOML: {_PLACE.sub('', message)}{curly}\n    {row.strip()[:100]}"


def key_lines(text: str) -> dict[str, int]:
    """The line of each key and table header of valid TOML `text`; keys inside inline tables have their table's."""
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    prefix, closing, depth = "", "", 0
    for number, row in enumerate(text.split("\n"), start=1):
        rest = row
        if closing:  # inside a long string
            _, found, rest = row.partition(closing)
            if not found:
                continue
            closing = ""
        elif depth == 0:
            header, assignment = _HEADER.match(row), _ASSIGNMENT.match(row)
            if header:
                name = _dotted(header[2])
                if header[1] == "[[":
                    counts[name] = counts.get(name, -1) + 1
                    name = f"{name}.{counts[name]}"
                _note(lines, name, number)
                prefix = name + "."
                continue
            if assignment is None:
                continue
            _note(lines, prefix + _dotted(assignment[1]), number)
            rest = assignment[2]
        for token in _TOKEN.finditer(rest):
            if token["open"]:
                closing = token["open"]
                break
            if token["bracket"]:
                depth += 1 if token["bracket"] in "[{" else -1
    return lines


def _note(lines: dict[str, int], key: str, number: int) -> None:
    parts = key.split(".")
    for end in range(1, len(parts) + 1):
        lines.setdefault(".".join(parts[:end]), number)


def _dotted(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))


def refuse(faults: Sequence[Fault]) -> None:
    """Raise all `faults` as one error, the first ten written out; NotYetError when all are features to come."""
    if not faults:
        return
    kind = NotYetError if all(fault.not_yet for fault in faults) else ConfigError
    if len(faults) == 1:
        raise kind(faults[0].text)
    listed = [f"  {fault.text}" for fault in faults[:FAULTS_SHOWN]]
    if len(faults) > FAULTS_SHOWN:
        listed.append(f"  and {len(faults) - FAULTS_SHOWN} more")
    raise kind("\n".join([f"{len(faults)} things to mend, nothing was started:", *listed]))
