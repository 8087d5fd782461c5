"""The shape of a row, by its keys, and the shapes that a method trains on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxdist.coordinator.encode.labels import is_label
from mlxdist.coordinator.encode.row_errors import RowError
from mlxdist.protocol.methods import METHODS, PAIR_FORMATS

Fields = Mapping[str, Any]

SHAPES: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt, completion": ("prompt", "completion"),
    "text": ("text",),
    "prompt, chosen, rejected": ("prompt", "chosen", "rejected"),
    "chosen, rejected": ("chosen", "rejected"),
    "prompt, completion, label": ("prompt", "completion", "label"),
}

# What other tools call the same things: only to word the remedy, never to guess.
_OTHER_NAMES = {
    "messages": ("conversations", "conversation", "dialog", "dialogue", "chat"),
    "prompt": ("instruction", "question", "query", "input", "problem"),
    "completion": ("output", "answer", "response", "solution", "target"),
    "chosen": ("accepted", "preferred", "win", "better"),
    "rejected": ("dispreferred", "lose", "worse"),
    "label": ("thumbs_up", "desirable", "feedback", "score"),
    "text": ("content", "document", "body"),
}


@dataclass(frozen=True, slots=True)
class Shaping:
    """The settings by which the keys of a row are read."""

    method: str
    columns: Mapping[str, str]  # our name = the name in the file
    unpair: bool = False

    @property
    def wanted(self) -> tuple[str, ...]:
        """The shapes that the method trains on."""
        spec = METHODS[self.method]
        return PAIR_FORMATS if self.unpair and spec.labels else spec.formats


def mapped(row: Fields, columns: Mapping[str, str]) -> Fields:
    """`row` with our names; a mapped name hides the key of the same name. Raises RowError for a missing key."""
    for ours, theirs in columns.items():
        if theirs not in row:
            raise RowError(f"there is no {theirs!r}, which data.columns reads as {ours}; the row has {_keys(row)}")
    return {**row, **{ours: row[theirs] for ours, theirs in columns.items()}}


def shape_of(fields: Fields, shaping: Shaping) -> str:
    """The shape of a row as the method reads it. Raises RowError, with what to do, for a row of another method."""
    for shape in shaping.wanted:
        if _has(fields, shape):
            if shape == "prompt, completion" and is_label(fields.get("label")):
                raise RowError('it has a label: rows to avoid would be trained as examples; method = "kto" reads it')
            return shape
    raise RowError(_remedy(fields, shaping))


def _remedy(fields: Fields, shaping: Shaping) -> str:
    needed = " or ".join(f"({shape})" for shape in shaping.wanted)
    found = f"{shaping.method} needs {needed}; the row has {_keys(fields)}"
    for method, spec in METHODS.items():
        if method != shaping.method and any(_has(fields, shape) for shape in spec.formats):
            unpairs = METHODS[shaping.method].labels and spec.formats == PAIR_FORMATS
            also = f"; data.unpair = true makes {shaping.method} rows of pairs" if unpairs else ""
            return f'{found}, which method = "{method}" trains on{also}'
    named = {
        ours: next((key for key in _OTHER_NAMES.get(ours, ()) if key in fields), None)
        for shape in shaping.wanted
        for ours in SHAPES[shape]
    }
    for shape in shaping.wanted:
        missing = {ours: named[ours] for ours in SHAPES[shape] if fields.get(ours) is None}
        if missing and all(missing.values()):
            columns = ", ".join(f'{ours} = "{theirs}"' for ours, theirs in missing.items())
            return f"{found}; if these are the same, set data.columns = {{{columns}}}"
    return found


def _has(fields: Fields, shape: str) -> bool:
    """Returns True if every key of `shape` is there; null counts as absent."""
    return all(fields.get(key) is not None for key in SHAPES[shape])


def _keys(row: Fields) -> str:
    keys = sorted(f"{key} (null)" if value is None else str(key) for key, value in row.items())
    return ", ".join(keys[:8]) + (", …" if len(keys) > 8 else "") or "no keys"
