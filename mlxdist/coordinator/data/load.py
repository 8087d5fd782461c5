"""Reads the data of a run: everything is found, checked, tokenized and counted before a model is loaded."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from mlxdist.coordinator.batch.row_store import StoredRows
from mlxdist.coordinator.batch.shuffle import fisher_yates, mulberry32
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.data.checks import (
    balance_notes,
    cut_notes,
    file_notes,
    fits_phrase,
    naming_notes,
    order_notes,
    prompt_notes,
    unread_notes,
    valid_cut_notes,
)
from mlxdist.coordinator.data.dated_template import DatedTemplate, asks_for_the_date
from mlxdist.coordinator.data.ingest import Progress, ReadFile, read_source
from mlxdist.coordinator.data.records import Splits
from mlxdist.coordinator.data.sources import find
from mlxdist.coordinator.encode.chat_template import ChatTemplate, switches_of
from mlxdist.coordinator.encode.encoding import Encoding, plain_text_note
from mlxdist.coordinator.encode.row_errors import refusal, skipped
from mlxdist.protocol.errors import DataError
from mlxdist.protocol.methods import METHODS


@dataclass(frozen=True)
class Dataset:
    """The rows of a run and what must be said of them before the first step."""

    train: StoredRows
    valid: StoredRows | None
    notes: tuple[str, ...]
    pad_id: int

    @property
    def digest(self) -> str:
        """Of every training token and target: the same data give the same, for a resumed run."""
        return self.train.digest

    @property
    def valid_digest(self) -> str:
        """The same of the validation rows; empty without any."""
        return self.valid.digest if self.valid is not None else ""


def read(config: RunConfig, *, progress: Progress, moment: datetime | None = None) -> Dataset:
    """The rows of `config`, tokenized with the model's tokenizer; its parameters are not touched.

    `progress` gets the thing that is read and the part of it that is done, 0 to 1. `moment`: see `encoding_of`. Raises
    DataError (rows, files) or ConfigError (the tokenizer) with the cure.
    """
    splits = find(config.data.path, config.data.valid_path)
    progress("reading the tokenizer", 0.0)
    return read_splits(splits, encoding_of(config, moment), progress=progress)


def encoding_of(config: RunConfig, moment: datetime | None = None) -> Encoding:
    """The tokenizer and chat template of a run. Takes about 2 s. Raises ConfigError.

    `moment`: the date for a template that writes one; None: now.
    """
    from mlxdist.coordinator.encode.limited_template import limited_apply
    from mlxdist.coordinator.encode.tokenizer import hub_tokenizer, load

    given = config.data.chat_template
    text = Path(given).read_text(encoding="utf-8") if given and "{" not in given and "\n" not in given else given
    wrapper = load(config.model, text)
    apply = limited_apply(wrapper) if wrapper.has_chat_template else None
    if apply is not None and asks_for_the_date(wrapper.chat_template):
        apply = DatedTemplate(wrapper, apply, moment or datetime.now())
    switches = switches_of(getattr(wrapper, "chat_template", None))
    template = ChatTemplate(apply, config.data.chat_template_kwargs, switches)
    tokenizer = hub_tokenizer(wrapper, wrapper.eos_token_ids)
    return Encoding(config, tokenizer, template, embeddings(Path(wrapper.name_or_path)))


def embeddings(folder: Path) -> int | None:
    """The number of tokens that the model in `folder` has embeddings of; None where its config.json does not say."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    tables = [config, config.get("text_config"), config.get("llm_config")]
    names = ("vocab_size", "num_vocab", "embedding_size")
    sizes = [table.get(name) for table in tables if isinstance(table, dict) for name in names]
    return max((size for size in sizes if isinstance(size, int)), default=None)


def read_splits(splits: Splits, encoding: Encoding, *, progress: Progress) -> Dataset:
    """The rows of `splits`. Raises DataError."""
    files = [read_source(source, encoding, progress) for source in (splits.train, splits.valid) if source is not None]
    notes = fault_notes(files, encoding.config)
    notes += [*column_notes(files), *file_notes(splits.unread)]
    train, valid, said = parted(files[0], files[1] if splits.valid is not None else None, encoding.config)
    notes += said
    for check in checks(files[0], train, encoding):
        notes += check()
    if splits.valid is not None:
        notes += valid_cut_notes(files[1].store.lengths, encoding.config.batch, encoding.config.method)
    notes += template_notes(files[0], encoding)
    return Dataset(train, valid, tuple(notes), encoding.tokenizer.pad_id)


def parted(
    train: ReadFile, valid: ReadFile | None, config: RunConfig
) -> tuple[StoredRows, StoredRows | None, list[str]]:
    """Training rows, validation rows, and a sentence where they come from one file. Raises DataError for no rows."""
    fraction = config.data.valid_fraction
    if not len(train.store):
        raise DataError(f"{train.store.name} has no rows to train on")
    if valid is not None and not len(valid.store):
        return StoredRows(train.store), None, [f"{valid.store.name} has no rows: there will be no validation."]
    if valid is not None:
        unused = f"Validation rows come from {valid.store.name}; data.valid_fraction keeps none back."
        return StoredRows(train.store), StoredRows(valid.store), [unused] if fraction else []
    if not fraction:
        return StoredRows(train.store), None, []
    rest, kept_back = set_apart(train, fraction, config.batch.seed)
    if not len(kept_back):
        return rest, None, ["One row cannot be split: data.valid_fraction keeps none back."]
    said = f"{len(kept_back)} of {len(train.store)} rows are kept back for validation (data.valid_fraction)."
    return rest, kept_back, [said]


def checks(file: ReadFile, train: StoredRows, encoding: Encoding) -> list[Callable[[], list[str]]]:
    """The checks of the training rows: each returns sentences for a person, or raises DataError."""
    config, longest = encoding.config, encoding.config.batch.max_length
    too_long = [fault.length for fault in file.faults if fault.length]
    every = [lambda: cut_notes([*file.store.lengths, *too_long], config.batch, config.method)]
    if METHODS[config.method].cut == "left":
        every.append(lambda: prompt_notes(train, longest, len(encoding.bos)))
    every.append(lambda: order_notes(len(train), config))
    labels = train.labels
    if labels is not None:
        every.append(lambda: balance_notes(labels, config.preference))
    return every


def set_apart(file: ReadFile, fraction: float, seed: int) -> tuple[StoredRows, StoredRows]:
    """Training and validation rows, each in file order; which are which is drawn with `seed`.

    The rows that were made of one line stay together. At least one line goes to each side where there are two.
    """
    store = file.store
    lines: dict[str, list[int]] = {}
    for row in range(len(store)):
        lines.setdefault(store.where(row), []).append(row)
    order = list(lines)
    fisher_yates(order, mulberry32(seed))
    n_valid = min(max(round(fraction * len(order)), 1), len(order) - 1)
    kept_back = set(order[:n_valid])
    return (
        StoredRows(store, [row for line in lines if line not in kept_back for row in lines[line]]),
        StoredRows(store, [row for line in lines if line in kept_back for row in lines[line]]),
    )


def column_notes(files: Sequence[ReadFile]) -> list[str]:
    """The sentences on columns that were recognized or that nothing reads; of a validation file where they differ.

    Raises DataError for a column of data.columns that no row has.
    """
    notes: list[str] = []
    before: list[object] = []
    for file in files:
        name, n_rows, unread = file.store.name, len(file.store), {key for key, count in file.columns.items() if count}
        named = list(naming_notes(name, file.known, file.named, file.columns))
        if (file.known, unread) not in before and file.shape:
            notes += [*named, *unread_notes(name, file.shape, n_rows, file.named, file.columns)]
        before.append((file.known, unread))
    return notes


def fault_notes(files: Sequence[ReadFile], config: RunConfig) -> list[str]:
    """The sentence of skipped rows. Raises DataError with the first ten faults where faulty rows are errors."""
    faults = [fault for file in files for fault in file.faults]
    n_rows = sum(file.n_rows for file in files)
    if not faults:
        return []
    if config.data.on_bad_row == "error":
        train = files[0]
        too_long = [fault.length for fault in train.faults if fault.length]
        advice = f"Of the lengths: {fits_phrase([*train.store.lengths, *too_long])}." if too_long else ""
        raise refusal(faults, n_rows, advice)
    return [skipped(faults, n_rows)]


def template_notes(file: ReadFile, encoding: Encoding) -> list[str]:
    """The sentences on what the chat template cannot do or does otherwise than the rows say."""
    notes = []
    if encoding.template.folded:
        notes.append("The chat template takes no system turn: system texts stand at the start of the first user turn.")
    if file.plain:
        notes.append(plain_text_note(encoding))
    apply = encoding.template.apply
    if isinstance(apply, DatedTemplate) and apply.writes:
        notes.append(
            f"The chat template writes the date into the rows: {apply.moment:%Y-%m-%d}, the day of the run's first "
            "reading, which --resume keeps; a program that uses the adapter writes the day of its use."
        )
    return notes + file.tally.sentences(file.n_rows)
