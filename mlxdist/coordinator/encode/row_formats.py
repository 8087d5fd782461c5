"""The shapes of rows, told by their keys, and the methods that train on them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mlxdist.coordinator.encode.labels import is_label
from mlxdist.coordinator.encode.row_errors import RowError
from mlxdist.protocol.methods import METHODS, PAIR_FORMATS

Fields = Mapping[str, Any]
ColumnNames = Mapping[str, str | tuple[str, ...]]  # our name = the name in the file, or several that are joined

SHAPES: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt, completion": ("prompt", "completion"),
    "text": ("text",),
    "prompt, chosen, rejected": ("prompt", "chosen", "rejected"),
    "chosen, rejected": ("chosen", "rejected"),
    "prompt, completion, label": ("prompt", "completion", "label"),
}

# Names of other tools for the same things: only to word the remedy, never to guess.
_OTHER_NAMES = {
    "messages": ("conversations", "conversation", "dialog", "dialogue", "chat"),
    "prompt": ("instruction", "question", "query", "input", "problem"),
    "completion": ("output", "answer", "response", "solution", "target"),
    "chosen": ("accepted", "preferred", "win", "better"),
    "rejected": ("dispreferred", "lose", "worse"),
    "label": ("thumbs_up", "kto_tag", "desirable", "feedback", "score"),
    "text": ("content", "document", "body"),
}
_WITH_PROMPT = ("input", "context")  # further text of a prompt, in a column of its own


@dataclass(frozen=True, slots=True)
class Shaping:
    """The settings that decide how the keys of a row are read."""

    method: str
    columns: ColumnNames
    unpair: bool = False

    @property
    def wanted(self) -> tuple[str, ...]:
        """The shapes that the method trains on."""
        spec = METHODS[self.method]
        return PAIR_FORMATS if self.unpair and spec.labels else spec.formats


def shape_of(fields: Fields, shaping: Shaping) -> str:
    """The shape of a row as the method reads it. Raises RowError, with what to do, for a row of another method."""
    for shape in shaping.wanted:
        if has_shape(fields, shape):
            if shape == "prompt, completion" and is_label(fields.get("label")):
                raise RowError('it has a label: rows to avoid would be trained as examples; method = "kto" reads it')
            return shape
    raise RowError(_remedy(fields, shaping))


def _remedy(fields: Fields, shaping: Shaping) -> str:
    needed = " or ".join(f"({shape})" for shape in shaping.wanted)
    found = f"{shaping.method} needs {needed}; the row has {keys_said(fields)}"
    for method, spec in METHODS.items():
        if method != shaping.method and any(has_shape(fields, shape) for shape in spec.formats):
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
            columns = {ours: theirs for ours, theirs in missing.items() if theirs is not None}
            return f"{found}; if these are the same, set data.columns = {columns_said(columns, fields)}"
    return found


def columns_said(columns: ColumnNames, keys: Collection[str] = ()) -> str:
    """`columns` as TOML. Further text of a prompt among a file's `keys` is joined to it."""
    said = []
    for ours, theirs in columns.items():
        names = [theirs] if isinstance(theirs, str) else list(theirs)
        if ours == "prompt":
            names += [key for key in _WITH_PROMPT if key in keys and key not in names]
        quoted = ", ".join(f'"{name}"' for name in names)
        said.append(f"{ours} = [{quoted}]" if len(names) > 1 else f"{ours} = {quoted}")
    return "{" + ", ".join(said) + "}"


def has_shape(fields: Fields, shape: str) -> bool:
    """True where every key of `shape` is there; null counts as absent."""
    return all(fields.get(key) is not None for key in SHAPES[shape])


def keys_said(row: Fields) -> str:
    """The keys of a row as a sentence lists them, at most eight."""
    keys = sorted(f"{key} (null)" if value is None else str(key) for key, value in row.items())
    return ", ".join(keys[:8]) + (", …" if len(keys) > 8 else "") or "no keys"
