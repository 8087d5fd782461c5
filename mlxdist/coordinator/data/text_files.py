"""Rows of text files, as a stream of records."""

import csv
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlxdist.coordinator.data.records import Record
from mlxdist.protocol.errors import DataError

_BOM = b"\xef\xbb\xbf"
_SPACE = re.compile(r"\s*")
_START = 256  # bytes of a file that are looked at for its encoding


class TwiceError(Exception):
    """An object of JSON that has a key two times. JSON allows it, and a reader can only guess which value is meant."""


def read_jsonl(path: Path) -> Iterator[Record]:
    """One JSON object per line; blank lines, a byte-order mark and CRLF are passed over. Holds one line at a time."""
    size, done = path.stat().st_size, 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            done += len(raw)
            if number == 1:
                _refuse_utf16(raw, path)
                raw = raw.removeprefix(_BOM)
            if raw.strip():
                yield Record(number, _object(raw.rstrip(b"\r\n")), done / size)


def read_json(path: Path) -> Iterator[Record]:
    """An array of objects, one element decoded at a time. Raises DataError where the array itself is broken."""
    raw = path.read_bytes()
    _refuse_utf16(raw, path)
    try:
        text = raw.removeprefix(_BOM).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path.name}: byte {error.start + 1} is no UTF-8; save the file as UTF-8") from error
    del raw
    twice: list[str] = []
    decoder = json.JSONDecoder(object_pairs_hook=lambda pairs: _noted(pairs, twice))
    place, line, counted = _skip(text, 0), 1, 0
    if text[place : place + 1] != "[":
        raise DataError(f"{path.name} holds no array; one object per line belongs into a .jsonl file")
    place = _skip(text, place + 1)
    while text[place : place + 1] != "]":
        line += text.count("\n", counted, place)
        counted = place
        try:
            row, place = decoder.raw_decode(text, place)
        except json.JSONDecodeError as error:
            raise DataError(f"{path.name}:{error.lineno}: broken JSON ({error.msg}, column {error.colno})") from error
        except (RecursionError, ValueError) as error:
            raise DataError(f"{path.name}:{line}: {_unreadable(error)}") from error
        found = twice[0] if twice else row if isinstance(row, dict) else f"{_name(row)}, not an object"
        twice.clear()
        yield Record(line, found, place / len(text))
        place = _skip(text, place)
        if text[place : place + 1] == ",":
            place = _skip(text, place + 1)
        elif text[place : place + 1] != "]":
            line += text.count("\n", counted, place)
            raise DataError(f"{path.name}:{line}: broken JSON (a comma or ] is missing after an element)")


def read_csv(path: Path) -> Iterator[Record]:
    """Rows under a header line, every value text."""
    size = path.stat().st_size
    with path.open("rb") as raw:
        _refuse_utf16(raw.read(_START), path)
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="", errors="surrogateescape") as file:
        rows = csv.reader(file, strict=True)
        header = next(rows, [])
        if len(set(header)) != len(header):
            raise DataError(f"{path.name}:1: the header names a column twice: {', '.join(header)}")
        before, done = rows.line_num, 0
        try:
            for cells in rows:
                done += sum(map(len, cells)) + len(cells)
                if cells:
                    yield Record(before + 1, _cells(header, cells), min(done / size, 1.0))
                before = rows.line_num
        except csv.Error as error:
            raise DataError(f"{path.name}:{before + 1}: broken CSV ({error})") from error


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises TwiceError for an object with a key two times, else as json.loads does."""
    twice: list[str] = []
    value = json.loads(text, object_pairs_hook=lambda pairs: _noted(pairs, twice))
    if twice:
        raise TwiceError(twice[0])
    return value


def _noted(pairs: list[tuple[str, Any]], twice: list[str]) -> dict[str, Any]:
    """The object of `pairs`; a key that stands twice is noted. Raising here would lose the place in the text."""
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        again = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        twice.append(f"the key {again!r} stands twice in one object; keep one of them")
    return made


def _cells(header: list[str], cells: list[str]) -> Mapping[str, Any] | str:
    if len(cells) != len(header):
        return f"{len(cells)} cells under a header of {len(header)}"
    return dict(zip(header, cells, strict=True))


def _object(raw: bytes) -> Mapping[str, Any] | str:
    try:
        row = parse_json(raw)
    except UnicodeDecodeError as error:
        return f"byte {error.start + 1} is no UTF-8"
    except json.JSONDecodeError as error:
        return f"broken JSON ({error.msg}, column {error.colno})"
    except TwiceError as error:
        return str(error)
    except (RecursionError, ValueError) as error:
        return _unreadable(error)
    return row if isinstance(row, dict) else f"{_name(row)}, not an object"


def _unreadable(error: Exception) -> str:
    """The reason for JSON that is right and that Python does not read."""
    return "JSON nested too deeply" if isinstance(error, RecursionError) else "a number with too many digits"


def _name(value: object) -> str:
    return {list: "a list", str: "text", type(None): "null", bool: "true or false"}.get(type(value), "a number")


def _skip(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    assert found is not None, "a pattern that matches nothing matches anywhere"
    return found.end()


def _refuse_utf16(start: bytes, path: Path) -> None:
    """UTF-16 by its mark or, without one, by zero bytes, which neither JSON nor CSV in UTF-8 holds."""
    if start[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in start[:_START]:
        raise DataError(f"{path.name} is UTF-16; save it as UTF-8")
