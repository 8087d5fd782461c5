"""The columns of a row under our names: mapped, joined or recognized by the keys, and text that nothing reads."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mlxdist.coordinator.data.message_cells import decoded
from mlxdist.coordinator.encode.row_errors import RowError
from mlxdist.coordinator.encode.row_formats import SHAPES, ColumnNames, Fields, Shaping, has_shape, keys_said

JOINT = "\n\n"  # between joined columns: a paragraph each, as a system text stands before a user turn
LOOKED_AT = 8  # items of a list or table in which text is looked for
INSTRUCTION: tuple[str, ...] = ("instruction", "input")


@dataclass(frozen=True, slots=True)
class Known:
    """A way of writing rows that other tools made usual."""

    name: str
    keys: tuple[str, ...]  # that a row has, each filled
    columns: ColumnNames  # what they are to us


ALPACA, SHARE_GPT = "alpaca", "ShareGPT"
KNOWN = (
    Known(ALPACA, ("instruction", "chosen", "rejected"), {"prompt": INSTRUCTION}),
    Known(ALPACA, ("instruction", "output"), {"prompt": INSTRUCTION, "completion": "output"}),
    Known(SHARE_GPT, ("conversations", "chosen", "rejected"), {"prompt": "conversations"}),
    Known(SHARE_GPT, ("conversations",), {"messages": "conversations"}),
)


@dataclass(frozen=True, slots=True)
class NamedRow:
    """A row of a file with its fields under our names."""

    raw: Fields  # as the file has it
    fields: Fields
    columns: ColumnNames  # those that named the fields
    known: str = ""  # the way of writing that the row was recognized by

    def unread(self, shape: str, beside: Collection[str]) -> Iterator[str]:
        """The columns with text that a row of `shape` does not read; those in `beside` are read with any shape."""
        read = {*SHAPES[shape], *beside}
        taken = (read - self.columns.keys()).union(
            *(sources(self.columns, ours) for ours in self.columns.keys() & read)
        )
        yield from (key for key, value in self.raw.items() if key not in taken and _speaks(value))


def named(row: Fields, shaping: Shaping) -> NamedRow:
    """`row` under our names, texts that are messages decoded.

    Where data.columns is empty and the row has no shape of ours, or one without its prompt, it is recognized by its
    keys. Raises RowError for a column that is not there, or that holds messages in a writing which is not JSON.
    """
    columns, known = shaping.columns, ""
    if not columns and not any(has_shape(row, shape) for shape in shaping.wanted if shape != "chosen, rejected"):
        for each in KNOWN:
            if _fits(row, each, shaping):
                columns, known = each.columns, each.name
                break
    under_ours = {ours: _named(row, ours, columns) for ours in columns}
    given_away = {theirs for ours in columns for theirs in sources(columns, ours)} - columns.keys()
    fields = {key: value for key, value in row.items() if key not in given_away} | under_ours
    return NamedRow(row, {key: decoded(key, value) for key, value in fields.items()}, columns, known)


def sources(columns: ColumnNames, ours: str) -> tuple[str, ...]:
    """The names in the file of one of our names."""
    theirs = columns[ours]
    return (theirs,) if isinstance(theirs, str) else tuple(theirs)


def _named(row: Fields, ours: str, columns: ColumnNames) -> Any:
    """The value for one of our names: a column's as it is, or the texts of several joined, blank ones left out."""
    theirs = columns[ours]
    if isinstance(theirs, str):
        if theirs not in row:
            raise RowError(f"there is no {theirs!r}, which data.columns reads as {ours}; the row has {keys_said(row)}")
        return row[theirs]
    there = {key: row[key] for key in theirs if row.get(key) is not None}
    if not there:
        names = ", ".join(map(repr, theirs))
        raise RowError(f"there is none of {names}, which data.columns joins into {ours}; the row has {keys_said(row)}")
    if len(there) == 1:
        return next(iter(there.values()))
    texts = [decoded(ours, value, key) for key, value in there.items()]
    for key, text in zip(there, texts, strict=True):
        if not isinstance(text, str):
            raise RowError(f"{key} is no text, and data.columns joins the texts of {', '.join(theirs)} into {ours}")
    return JOINT.join(text for text in texts if text.strip())


def _fits(row: Fields, known: Known, shaping: Shaping) -> bool:
    """True where `row` is written in the `known` way, and the method trains on such rows."""
    if any(row.get(key) is None for key in known.keys):
        return False
    if known.name == SHARE_GPT and not isinstance(row["conversations"], list | str):
        return False
    fields = {**row, **dict.fromkeys(known.columns, "")}
    return any(has_shape(fields, shape) for shape in shaping.wanted)


def _speaks(value: Any) -> bool:
    """True where a value holds text."""
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, list) and any(map(_speaks, value[:LOOKED_AT]))
