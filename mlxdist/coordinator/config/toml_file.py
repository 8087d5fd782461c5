"""Reads a TOML file that a person wrote, and names the lines of its faults."""

import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxdist.protocol.errors import ConfigError

FAULTS_SHOWN = 10

CURLY_QUOTES = re.compile("[\u2018-\u201f]")
_PLACE = re.compile(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)$")  # how tomllib ends its messages


@dataclass(frozen=True)
class TomlFile:
    """A file's values, and the line (from 1) of each dotted key. Tables of an array count from 0: nodes.0.host."""

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[str, int]

    def place(self, key: str) -> str:
        """Returns `run.toml:12: batch.size`. A key without a line of its own has its table's, or none."""
        parts = key.split(".")
        name = ".".join(part for part in parts if not part.isdecimal())
        above = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        line = next((f":{self.lines[each]}" for each in above if each in self.lines), "")
        return f"{self.path}{line}: {name}"


def read_toml(path: Path) -> TomlFile:
    """Reads the file at `path`. Raises ConfigError, with file:line:column, when it cannot be read or is not TOML."""
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
    curly = "; it has typographic quotes where TOML takes straight ones" if CURLY_QUOTES.search(row) else ""
    return f"{path}:{line}:{column}: is not TOML: {_PLACE.sub('', message)}{curly}\n    {row.strip()[:100]}"


def key_lines(text: str) -> dict[str, int]:
    """Returns the line of each key and table header of the valid TOML `text`.

    tomllib gives values without lines. So the text is cut into statements: as many lines as tomllib can read alone.
    """
    lines: dict[str, int] = {}
    headers = Counter[str]()
    table, start, rows = "", 1, list[str]()
    for number, row in enumerate(text.split("\n"), start=1):
        rows.append(row)
        try:
            values = tomllib.loads("\n".join(rows))
        except tomllib.TOMLDecodeError:  # the statement goes on in the next line
            continue
        is_header = rows[0].lstrip().startswith("[")
        keys = list(_dotted(values, "" if is_header else table))
        if is_header:
            table = f"{keys[-1]}."
            if rows[0].lstrip().startswith("[["):
                keys.append(f"{table}{headers[table]}")
                headers[table] += 1
                table = f"{keys[-1]}."
        for key in keys:
            lines.setdefault(key, start)
        start, rows = number + 1, []
    return lines


def _dotted(values: Mapping[str, Any], table: str) -> Iterator[str]:
    """Yields every key of nested `values` after the prefix `table`, "a" before "a.b"."""
    for key, value in values.items():
        yield table + key
        if isinstance(value, dict):
            yield from _dotted(value, f"{table}{key}.")


def raise_faults(faults: Sequence[str], kind: type[ConfigError] = ConfigError) -> None:
    """Raises all `faults`, if there are any, as one error of `kind` with the first ten written out."""
    if len(faults) == 1:
        raise kind(faults[0])
    if faults:
        more = [f"and {len(faults) - FAULTS_SHOWN} more"] if len(faults) > FAULTS_SHOWN else []
        listed = "".join(f"\n  {fault}" for fault in [*faults[:FAULTS_SHOWN], *more])
        raise kind(f"{len(faults)} things to fix, nothing was started:{listed}")
