"""From a source to a store: rows checked, drawn up, encoded many at once and kept as arrays, in one stream."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from mlxdist.coordinator.encode_pairs import draft_pair
from mlxdist.coordinator.encode_sft import draft_sft
from mlxdist.coordinator.encoding import Draft, Encoding
from mlxdist.coordinator.faults import Fault, RowError
from mlxdist.coordinator.records import Record, Source
from mlxdist.coordinator.rows import RowStore
from mlxdist.coordinator.shapes import Shaping, mapped, shape_of
from mlxdist.protocol.errors import DataError

BATCH_ROWS = 1024  # encoded at once: enough for every core of a fast tokenizer
BATCH_CHARACTERS = 1 << 20  # the same, where rows are long: their ids are Python lists for a moment

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class ReadFile:
    """All that was read of one source."""

    store: RowStore
    faults: tuple[Fault, ...]  # in the order of their lines
    n_rows: int  # good and faulty
    shape: str  # "" where no row is good
    plain: bool  # whether prompts and responses are texts, which no chat template touches


def read_source(source: Source, encoding: Encoding, progress: Progress) -> ReadFile:
    """Every good row of `source` in a store, the others as faults. Raises DataError for a file of mixed shapes.

    Memory: one batch of rows as objects at a time, the rest as arrays.
    """
    config = encoding.config
    shaping = Shaping(config.method, config.data.columns, config.data.unpair)
    store = RowStore(source.name, config.method, config.batch.max_length, encoding.tokenizer.bos_id)
    faults: list[Fault] = []
    waiting: list[tuple[int, Draft]] = []
    n_rows, n_characters, first, plain = 0, 0, ("", 0), False
    for record in source.records():
        n_rows += 1
        try:
            fields = fields_of(record, shaping)
            shape = shape_of(fields, shaping)
            if not first[0]:
                first, plain = (shape, record.line), _is_plain(fields)
            if shape != first[0]:
                raise _mixed(source.name, first, (shape, record.line))
            waiting.append((record.line, draft(shape, fields, encoding)))
            n_characters += sum(map(len, waiting[-1][1].texts))
        except RowError as reason:
            faults.append(Fault(source.name, record.line, str(reason), reason.length))
        if n_rows % BATCH_ROWS == 0 or n_characters >= BATCH_CHARACTERS:
            faults += _finish(waiting, encoding, store)
            waiting, n_characters = [], 0
            progress(f"reading {source.name}", record.share)
    faults += _finish(waiting, encoding, store)
    progress(f"reading {source.name}", 1.0)
    return ReadFile(store, tuple(sorted(faults, key=lambda fault: fault.line)), n_rows, first[0], plain)


def fields_of(record: Record, shaping: Shaping) -> Mapping[str, Any]:
    """The row under our names. Raises RowError."""
    if isinstance(record.row, str):
        raise RowError(record.row)
    return mapped(record.row, shaping.columns)


def draft(shape: str, fields: Mapping[str, Any], encoding: Encoding) -> Draft:
    """The texts of a row of any method. Raises RowError."""
    make = draft_sft if encoding.config.method == "sft" else draft_pair
    return make(shape, fields, encoding)


def _finish(drafts: list[tuple[int, Draft]], encoding: Encoding, store: RowStore) -> Iterator[Fault]:
    ids = iter(encoding.tokenizer.encode_batch([text for _, each in drafts for text in each.texts]))
    for line, each in drafts:
        try:
            for row in each.finish(list(islice(ids, len(each.texts)))):
                store.add(line, row.parts, row.length, label=row.label, side=row.side)
        except RowError as reason:
            yield Fault(store.name, line, str(reason), reason.length)


def _is_plain(fields: Mapping[str, Any]) -> bool:
    return isinstance(fields.get("prompt"), str) and any(
        isinstance(fields.get(key), str) for key in ("completion", "chosen")
    )


def _mixed(name: str, first: tuple[str, int], other: tuple[str, int]) -> DataError:
    return DataError(
        f"{name} mixes shapes: line {first[1]} has ({first[0]}), line {other[1]} has ({other[0]}); "
        "one file, one shape: split it, or rename keys with data.columns"
    )
