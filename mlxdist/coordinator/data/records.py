"""The form in which every source gives its rows: records with line numbers, by split."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a source, or the reason why it is none."""

    line: int  # from 1: where the row begins in its file
    row: Mapping[str, Any] | str  # or the reason of a fault
    share: float  # part of the source that was read, 0 to 1
    file: str = ""  # of a source of several files: the one that holds the row


@dataclass(frozen=True)
class Source:
    """Rows with the name that stands before their line numbers."""

    name: str
    records: Callable[[], Iterator[Record]]


@dataclass(frozen=True)
class Splits:
    """The sources of a run."""

    train: Source
    valid: Source | None
    test: Source | None
    unread: tuple[str, ...] = ()  # files beside them that look like rows and belong to no split
