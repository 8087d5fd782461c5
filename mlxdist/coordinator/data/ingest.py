"""From a source to a store: rows checked, drawn up, encoded many at once and kept as arrays, in one stream."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from mlxdist.coordinator.batch.row_store import RowStore
from mlxdist.coordinator.data.records import Record, Source
from mlxdist.coordinator.encode.encoding import Draft, Encoding
from mlxdist.coordinator.encode.preference import draft_pair
from mlxdist.coordinator.encode.remarks import Tally
from mlxdist.coordinator.encode.row_errors import Fault, RowError
from mlxdist.coordinator.encode.row_formats import Shaping, mapped, shape_of
from mlxdist.coordinator.encode.sft import draft_sft
from mlxdist.protocol.errors import DataError
from mlxdist.protocol.methods import METHODS

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
    plain: bool  # whether prompts and responses are texts
    tally: Tally  # what is to be said of its rows


def read_source(source: Source, encoding: Encoding, progress: Progress) -> ReadFile:
    """Every good row of `source` in a store, the others as faults. Raises DataError for a file of mixed shapes.

    Memory: two batches of rows as objects at a time, the rest as arrays.
    """
    config = encoding.config
    shaping = Shaping(config.method, config.data.columns, config.data.unpair)
    store = RowStore(source.name, config.method, config.batch.max_length, encoding.tokenizer.bos_id)
    faults: list[Fault] = []
    n_rows, n_characters, first, plain, tally = 0, 0, ("", 0), False, Tally()
    with ThreadPoolExecutor(max_workers=1) as thread:
        encoder = _Encoder(encoding, store, thread)
        for record in source.records():
            n_rows += 1
            try:
                fields = fields_of(record, shaping)
                shape = shape_of(fields, shaping)
                if not first[0]:
                    first, plain = (shape, record.line), _is_plain(fields)
                if shape != first[0]:
                    raise _mixed(source.name, first, (shape, record.line))
                made = draft(shape, fields, encoding)
                tally.add(made.remarks)
                encoder.waiting.append((record.line, made))
                n_characters += sum(map(len, made.texts))
            except RowError as reason:
                faults.append(Fault(source.name, record.line, str(reason), reason.length))
            if n_rows % BATCH_ROWS == 0 or n_characters >= BATCH_CHARACTERS:
                faults += encoder.turn()
                n_characters = 0
                progress(f"reading {source.name}", record.share)
        faults += [*encoder.turn(), *encoder.turn()]
    progress(f"reading {source.name}", 1.0)
    return ReadFile(store, tuple(sorted(faults, key=lambda fault: fault.line)), n_rows, first[0], plain, tally)


def fields_of(record: Record, shaping: Shaping) -> Mapping[str, Any]:
    """The row under our names. Raises RowError."""
    if isinstance(record.row, str):
        raise RowError(record.row)
    return mapped(record.row, shaping.columns)


def draft(shape: str, fields: Mapping[str, Any], encoding: Encoding) -> Draft:
    """The texts of a row of any method. Raises RowError."""
    make = draft_pair if METHODS[encoding.config.method].losses else draft_sft
    return make(shape, fields, encoding)


@dataclass
class _Encoder:
    """Encodes one batch beside the rendering of the next: a fast tokenizer works without Python's lock."""

    encoding: Encoding
    store: RowStore
    thread: ThreadPoolExecutor
    waiting: list[tuple[int, Draft]] = field(default_factory=list)  # line and texts, not yet given to the tokenizer
    encoded: list[tuple[int, Draft]] = field(default_factory=list)  # those that it has
    ids: Future[list[list[int]]] | None = None

    def turn(self) -> list[Fault]:
        """Give what waits to the tokenizer, and store what it had before. Returns the faults among these."""
        texts = [text for _, each in self.waiting for text in each.texts]
        done, ids = self.encoded, iter(self.ids.result() if self.ids else [])
        self.encoded, self.waiting = self.waiting, []
        self.ids = self.thread.submit(self.encoding.tokenizer.encode_batch, texts)
        faults = []
        for line, each in done:
            try:
                for row in each.finish(list(islice(ids, len(each.texts)))):
                    self.store.add(line, row.parts, row.length, label=row.label, side=row.side)
            except RowError as reason:
                faults.append(Fault(self.store.name, line, str(reason), reason.length))
        return faults


def _is_plain(fields: Mapping[str, Any]) -> bool:
    return isinstance(fields.get("prompt"), str) and any(
        isinstance(fields.get(key), str) for key in ("completion", "chosen")
    )


def _mixed(name: str, first: tuple[str, int], other: tuple[str, int]) -> DataError:
    return DataError(
        f"{name} mixes shapes: line {first[1]} has ({first[0]}), line {other[1]} has ({other[0]}); "
        "one file, one shape: split it, or rename keys with data.columns"
    )
