"""Faulty rows: found one by one, said together, ten at a time, each as file:line with its reason."""

from collections.abc import Sequence
from dataclasses import dataclass

from mlxdist.protocol.errors import DataError

SHOWN = 10


class TemplateLimitError(Exception):
    """A chat template that makes too much text, or takes too long."""


class RowError(Exception):
    """A row that cannot be trained on; its text is the reason, to follow "file:line: ". ingest makes a RowFault of it.

    `length`: the row's tokens where it is its length that is wrong, else 0.
    """

    def __init__(self, reason: str, length: int = 0) -> None:
        super().__init__(reason)
        self.length = length


@dataclass(frozen=True, slots=True)
class RowFault:
    """One faulty row."""

    name: str  # of the file
    line: int
    reason: str
    length: int = 0  # tokens, where the row is too long

    @property
    def where(self) -> str:
        """File and line."""
        return f"{self.name}:{self.line}"


def refusal(faults: Sequence[RowFault], n_rows: int, advice: str = "") -> DataError:
    """The error for a run that stops at faulty rows: the first ten, how many there are, and what to do."""
    lines = [f"  {fault.where}: {fault.reason}" for fault in faults[:SHOWN]]
    if len(faults) > SHOWN:
        lines.append(f"  … and {len(faults) - SHOWN} more")
    cure = 'Fix them, or set data.on_bad_row = "skip" to train without them.'
    return DataError(
        "\n".join([f"{_count(faults, n_rows)}, nothing was trained:", *lines, *([advice] if advice else []), cure])
    )


def skipped(faults: Sequence[RowFault], n_rows: int) -> str:
    """The sentence for a run that goes on without its faulty rows."""
    first = "; ".join(f"{fault.where}: {fault.reason}" for fault in faults[:3])
    more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
    return f"{_count(faults, n_rows)} and left out ({first}{more})."


def kind_of(value: object) -> str:
    """The kind of a value in a reader's words: 'null', 'a list', 'a number (3)'."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"{str(value).lower()}"
    if isinstance(value, int | float):
        return f"a number ({value})"
    kinds = ((str, "text"), (list, "a list"), (dict, "an object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), type(value).__name__)


def _count(faults: Sequence[RowFault], n_rows: int) -> str:
    return f"{len(faults)} of {n_rows} rows {'is' if len(faults) == 1 else 'are'} faulty"
