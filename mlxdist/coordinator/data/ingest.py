"""From a source to a store: rows checked, drawn up, encoded many at once and kept as arrays, in one stream."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from mlxdist.coordinator.batch.row_store import TARGET, RowStore
from mlxdist.coordinator.data.columns import NamedRow, named
from mlxdist.coordinator.data.records import Record, Source
from mlxdist.coordinator.encode.encoding import Draft, Encoded, Encoding
from mlxdist.coordinator.encode.long_texts import encode_all
from mlxdist.coordinator.encode.preference import draft_pair
from mlxdist.coordinator.encode.remarks import Tally
from mlxdist.coordinator.encode.row_errors import RowError, RowFault
from mlxdist.coordinator.encode.row_formats import ColumnNames, Shaping, shape_of
from mlxdist.coordinator.encode.sft import draft_sft
from mlxdist.protocol.errors import DataError
from mlxdist.protocol.methods import METHODS

BATCH_ROWS = 1024  # encoded at once: enough for every core of a fast tokenizer
BATCH_CHARACTERS = 1 << 20  # the same, where rows are long: their ids are Python lists for a moment
BESIDE = ("tools", "chat_template_kwargs")  # columns that are read with every shape but text

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class ReadFile:
    """All that was read of one source."""

    store: RowStore
    faults: tuple[RowFault, ...]  # in the order of their lines
    n_rows: int  # good and faulty
    shape: str  # "" where no row is good
    plain: bool  # True where prompts and responses are texts
    tally: Tally  # what is to be said of its rows
    known: str  # the way of writing by which its rows were recognized, "" for our own or data.columns
    named: ColumnNames  # what names its rows: data.columns, or that of the way of writing
    columns: Mapping[str, int]  # every column of the good rows -> rows in which it has text that nothing reads


def read_source(source: Source, encoding: Encoding, progress: Progress) -> ReadFile:
    """Every good row of `source` in a store, the others as faults. Raises DataError for a file of mixed shapes.

    Memory: two batches of rows as objects at a time, the rest as arrays.
    """
    config = encoding.config
    shaping = Shaping(config.method, config.data.columns, config.data.unpair)
    store = RowStore(source.name, config.method, config.batch.max_length, encoding.tokenizer.bos_id)
    faults: list[RowFault] = []
    n_rows, n_characters, first, plain, known, tally = 0, 0, ("", ""), False, "", Tally()
    naming: ColumnNames = config.data.columns
    columns: Counter[str] = Counter()
    with ThreadPoolExecutor(max_workers=1) as thread:
        encoder = _Encoder(encoding, store, thread)
        for record in source.records():
            n_rows += 1
            try:
                row = row_of(record, shaping)
                fields, shape = row.fields, shape_of(row.fields, shaping)
                if not first[0]:
                    first, plain = (shape, _place(record)), _is_plain(fields)
                    known, naming = row.known, row.columns
                if shape != first[0]:
                    raise _mixed(source.name, first, (shape, _place(record)))
                made = draft(shape, fields, encoding)
                tally.add(made.remarks)
                columns.update(dict.fromkeys(row.raw, 0))
                columns.update(row.unread(shape, _read_beside(shape, fields, encoding)))
                encoder.waiting.append((record, made))
                n_characters += sum(map(len, made.texts))
            except RowError as reason:
                faults.append(_fault(source.name, record, reason))
            if n_rows % BATCH_ROWS == 0 or n_characters >= BATCH_CHARACTERS:
                faults += encoder.turn()
                n_characters = 0
                progress(f"reading {source.name}", record.share)
        faults += [*encoder.turn(), *encoder.turn()]
    progress(f"reading {source.name}", 1.0)
    in_order = tuple(sorted(faults, key=lambda fault: (fault.name, fault.line)))
    return ReadFile(store, in_order, n_rows, first[0], plain, tally, known, naming, columns)


def row_of(record: Record, shaping: Shaping) -> NamedRow:
    """The row under our names. Raises RowError."""
    if isinstance(record.row, str):
        raise RowError(record.row)
    return named(record.row, shaping)


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
    waiting: list[tuple[Record, Draft]] = field(default_factory=list)  # not yet given to the tokenizer
    encoded: list[tuple[Record, Draft]] = field(default_factory=list)  # those that it has
    ids: Future[list[list[int]]] | None = None

    def turn(self) -> list[RowFault]:
        """Give what waits to the tokenizer, and store what it had before. Returns the faults among these."""
        texts = [text for _, each in self.waiting for text in each.texts]
        done, ids = self.encoded, iter(self.ids.result() if self.ids else [])
        self.encoded, self.waiting = self.waiting, []
        self.ids = self.thread.submit(encode_all, self.encoding.tokenizer, texts)
        faults = []
        for record, each in done:
            try:
                self.store.begin(record.file)
                for row in self._known_tokens(each.finish(list(islice(ids, len(each.texts))))):
                    self.store.add(record.line, row.parts, row.length, label=row.label, side=row.side)
            except RowError as reason:
                faults.append(_fault(self.store.name, record, reason))
        return faults

    def _known_tokens(self, rows: list[Encoded]) -> Iterator[Encoded]:
        """`rows`. Raises RowError, before the first is given, for a token that the model has no embedding of."""
        limit = self.encoding.vocabulary
        for words in (words & ~TARGET for row in rows for words in row.parts):
            if limit is not None and len(words) and words.max() >= limit:
                token = int(words[(words >= limit).argmax()])
                raise RowError(
                    f"its token {token} ({self.encoding.tokenizer.decode([token])!r}) is beyond the {limit} that the "
                    "model has embeddings of: the tokenizer was changed and the model was not; take the tokenizer "
                    "that came with the model, or a model with as many embeddings"
                )
        yield from rows


def _read_beside(shape: str, fields: Mapping[str, Any], encoding: Encoding) -> tuple[str, ...]:
    """The columns that are read beside those of the shape; a system text only where the prompt's becomes a turn."""
    if shape == "text":
        return ()
    becomes_turn = isinstance(fields.get("prompt"), str) and (encoding.wraps or not _is_plain(fields))
    return (*BESIDE, "system") if becomes_turn else BESIDE


def _is_plain(fields: Mapping[str, Any]) -> bool:
    return isinstance(fields.get("prompt"), str) and any(
        isinstance(fields.get(key), str) for key in ("completion", "chosen")
    )


def _place(record: Record) -> str:
    return f"{record.file}:{record.line}" if record.file else f"line {record.line}"


def _fault(name: str, record: Record, reason: RowError) -> RowFault:
    return RowFault(record.file or name, record.line, str(reason), reason.length)


def _mixed(name: str, first: tuple[str, str], other: tuple[str, str]) -> DataError:
    return DataError(
        f"{name} mixes shapes: {first[1]} has ({first[0]}), {other[1]} has ({other[0]}); "
        "one file, one shape: split it, or rename keys with data.columns"
    )
