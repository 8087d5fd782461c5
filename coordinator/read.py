"""Reads the data of a run: everything is found, checked, tokenised and counted before a model is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxdist.coordinator.chat import ChatTemplate
from mlxdist.coordinator.config import RunConfig
from mlxdist.coordinator.encoding import Encoding
from mlxdist.coordinator.faults import refusal, skipped
from mlxdist.coordinator.notes import balance_notes, cut_notes, fits_phrase, order_notes
from mlxdist.coordinator.reading import Progress, ReadFile, read_source
from mlxdist.coordinator.records import Splits
from mlxdist.coordinator.rows import StoredRows
from mlxdist.coordinator.shuffle import fisher_yates, mulberry32
from mlxdist.coordinator.sources import find
from mlxdist.protocol.errors import DataError


@dataclass(frozen=True)
class Dataset:
    """The rows of a run and what must be said of them before the first step."""

    train: StoredRows
    valid: StoredRows | None
    notes: tuple[str, ...]
    pad_id: int
    digest: str  # of every training token and target: the same data give the same, for a resumed run


def read(config: RunConfig, *, progress: Progress) -> Dataset:
    """The rows of `config`, tokenised with the model's tokenizer; its parameters are not touched.

    `progress` gets what is read and the part of it that is done, 0 to 1. Raises DataError (rows, files) or ConfigError
    (the tokenizer) with what to do.
    """
    splits = find(config.data.path, config.data.valid_path)
    progress("reading the tokenizer", 0.0)
    return read_splits(splits, encoding_of(config), progress=progress)


def encoding_of(config: RunConfig) -> Encoding:
    """The tokenizer and chat template of a run. Takes about 2 s. Raises ConfigError."""
    from mlxdist.coordinator.tokenizer import hub_tokenizer, load

    given = config.data.chat_template
    text = Path(given).read_text(encoding="utf-8") if given and "{" not in given and "\n" not in given else given
    wrapper = load(config.model, text)
    apply = wrapper.apply_chat_template if wrapper.has_chat_template else None
    template = ChatTemplate(apply, config.data.chat_template_kwargs)
    return Encoding(config, hub_tokenizer(wrapper, wrapper.eos_token_ids), template)


def read_splits(splits: Splits, encoding: Encoding, *, progress: Progress) -> Dataset:
    """The rows of `splits`. Raises DataError."""
    config = encoding.config
    files = [read_source(source, encoding, progress) for source in (splits.train, splits.valid) if source is not None]
    notes = _fault_notes(files, config)
    train_file = files[0]
    if not len(train_file.store):
        raise DataError(f"{train_file.store.name} has no rows to train on")
    store = train_file.store
    train, valid = StoredRows(store), StoredRows(files[1].store) if splits.valid is not None else None
    if valid is None and config.data.valid_fraction:
        train, valid = split(train_file, config.data.valid_fraction, config.batch.seed)
        notes.append(f"{len(valid)} of {len(store)} rows are kept back for validation (data.valid_fraction).")
    elif config.data.valid_fraction:
        notes.append(f"Validation rows come from {files[1].store.name}; data.valid_fraction keeps none back.")
    too_long = [fault.length for fault in train_file.faults if fault.length]
    notes += cut_notes([*store.lengths, *too_long], config.batch, config.method)
    notes += order_notes(len(train), config)
    if train.labels is not None:
        notes += balance_notes(train.labels, config.preference)
    notes += _template_notes(train_file, encoding)
    return Dataset(train, valid, tuple(notes), encoding.tokenizer.pad_id, store.digest)


def split(file: ReadFile, fraction: float, seed: int) -> tuple[StoredRows, StoredRows]:
    """Training and validation rows, each in file order; which are which is drawn with `seed`.

    The rows that were made of one line stay together. At least one line goes to each side where there are two.
    """
    store = file.store
    lines: dict[int, list[int]] = {}
    for row, line in enumerate(store.lines):
        lines.setdefault(line, []).append(row)
    order = list(lines)
    fisher_yates(order, mulberry32(seed))
    n_valid = min(max(round(fraction * len(order)), 1), len(order) - 1)
    kept_back = set(order[:n_valid])
    return (
        StoredRows(store, [row for line in lines if line not in kept_back for row in lines[line]]),
        StoredRows(store, [row for line in lines if line in kept_back for row in lines[line]]),
    )


def _fault_notes(files: Sequence[ReadFile], config: RunConfig) -> list[str]:
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


def _template_notes(file: ReadFile, encoding: Encoding) -> list[str]:
    notes = []
    if encoding.template.folded:
        notes.append("The chat template takes no system turn: system texts stand at the start of the first user turn.")
    if file.plain and encoding.template.apply is not None:
        notes.append(
            "Prompts and responses are plain texts: the model's chat template, which is for messages, is not used."
        )
    return notes
