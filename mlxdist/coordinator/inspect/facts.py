"""The facts that `mlxdist inspect` counts in the data of a run.

Lengths are in tokens, or in characters when no model was named.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np

from mlxdist.coordinator.batch.batch_order import steps, steps_per_epoch
from mlxdist.coordinator.batch.leaf_tokens import auto_leaf_tokens
from mlxdist.coordinator.batch.micro_batches import fill
from mlxdist.coordinator.batch.row_store import RowStore, StoredRows
from mlxdist.coordinator.config.advice import weight_ranges
from mlxdist.coordinator.config.schema import PreferenceConfig, RunConfig
from mlxdist.coordinator.data.checks import FITS, length_that_fits
from mlxdist.coordinator.data.ingest import ReadFile
from mlxdist.coordinator.encode.tokenizer import Tokenizer
from mlxdist.protocol.leaves import Row, item_tokens

PERCENTILES = (10, 50, 90, 99)
BINS = 8
STEPS_LOOKED_AT = 1_000


@dataclass(frozen=True)
class Bin:
    """The number of rows whose lengths are `low` to `high`, both included."""

    low: int
    high: int
    rows: int


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one kind, as text."""

    text: str
    trained: bool


@dataclass(frozen=True)
class Sample:
    """One row as the model reads it: one list of pieces, or two for a pair."""

    where: str
    branches: list[list[Piece]]


@dataclass(frozen=True)
class Labels:
    """The counts of the two classes of KTO, and the ranges of weights that balance them by TRL's rule."""

    desirable: int
    undesirable: int
    desirable_weight: tuple[float, float] | None
    undesirable_weight: tuple[float, float] | None


@dataclass(frozen=True)
class FileFacts:
    """One file of a run."""

    split: str  # train | valid | test
    name: str
    shape: str
    rows: int  # that can be trained on
    faulty: int
    duplicates: int  # rows that are the same as an earlier one
    lengths: dict[str, float]
    histogram: list[Bin]
    fits: dict[str, int]  # percent of the rows -> the max_length that cuts none of them
    cut: int
    tokens: int  # of all rows, after cutting
    trained: int  # the targets among them
    labels: Labels | None


@dataclass(frozen=True)
class BatchFacts:
    """The batches that are made of the training rows."""

    size: int
    leaf_tokens: int
    grad_accum_steps: int
    steps_per_epoch: int
    leaves: float  # of a step, on average
    fill: float  # tokens of a leaf, on average, relative to leaf_tokens


@dataclass(frozen=True)
class Inspection:
    """Everything that `mlxdist inspect` shows."""

    data: str
    method: str
    model: str
    unit: str  # tokens | characters
    files: list[FileFacts]
    batch: BatchFacts | None
    samples: list[Sample]
    notes: list[str]
    faults: list[dict[str, Any]]  # of each faulty row: where, reason
    refused: list[str]  # why a run would not start


def file_facts(split: str, file: ReadFile, config: RunConfig) -> FileFacts:
    """Returns the facts of one file."""
    data = StoredRows(file.store)
    lengths = data.lengths.tolist()
    tokens = trained = 0
    for index in range(len(data)):
        for row in data.rows(index):
            tokens, trained = tokens + len(row.ids), trained + int(row.targets.sum())
    return FileFacts(
        split,
        file.store.name,
        file.shape,
        len(data),
        len(file.faults),
        duplicates(file.store),
        _lengths(lengths),
        histogram(lengths),
        {f"{share:.0%}": length_that_fits(lengths, share) for share in FITS} if lengths else {},
        sum(length > config.batch.max_length for length in lengths),
        tokens,
        trained,
        None if data.labels is None else _labels(data.labels.tolist(), config.preference),
    )


def duplicates(store: RowStore) -> int:
    """Returns how many rows have the same tokens, targets and label as an earlier row."""
    seen = set()
    for index in range(len(store)):
        key = hashlib.blake2b(bytes([store.labels[index]]), digest_size=16)
        for words in store.sequences(index):
            key.update(len(words).to_bytes(8, "little") + words.tobytes())
        seen.add(key.digest())
    return len(store) - len(seen)


def histogram(lengths: Sequence[int]) -> list[Bin]:
    """Returns equal bins from the shortest length to the one that fits 99 % of the rows, and a bin for the rest."""
    if not lengths:
        return []
    low, high, longest = min(lengths), length_that_fits(lengths, 0.99), max(lengths)
    width = max(-(-(high - low + 1) // BINS), 1)
    edges = [*range(low, high + 1, width), high + 1, longest + 1]
    counted = (sum(start <= length < end for length in lengths) for start, end in pairwise(edges))
    bins = zip(pairwise(edges), counted, strict=True)
    return [Bin(start, end - 1, rows) for (start, end), rows in bins if start < end]


def batch_facts(data: StoredRows, config: RunConfig) -> BatchFacts:
    """Returns the facts of one epoch."""
    batch, method = config.batch, config.method
    per_epoch = steps_per_epoch(len(data), batch, method)
    leaf_tokens = batch.leaf_tokens
    if leaf_tokens == "auto":
        leaf_tokens = auto_leaf_tokens(data, batch, method)
    order = islice(steps(data.lengths.tolist(), batch, method), min(per_epoch, STEPS_LOOKED_AT))
    items = [[item_tokens(data.rows(row)) for row in step.rows] for step in order]
    leaves = sum(len(fill(step, leaf_tokens)) for step in items)
    full = sum(map(sum, items)) / (leaves * leaf_tokens) if leaves else 0.0
    return BatchFacts(batch.size, leaf_tokens, batch.grad_accum_steps, per_epoch, leaves / max(len(items), 1), full)


def samples(data: StoredRows, tokenizer: Tokenizer) -> list[Sample]:
    """Returns the first, the middle and the last row."""
    chosen = sorted({0, len(data) // 2, len(data) - 1}) if len(data) else []
    return [Sample(data.where(index), [pieces(row, tokenizer) for row in data.rows(index)]) for index in chosen]


def pieces(row: Row, tokenizer: Tokenizer) -> list[Piece]:
    """Returns a row's tokens as text, in alternating pieces that are trained and not trained."""
    borders = [0, *(np.flatnonzero(np.diff(row.targets)) + 1).tolist(), len(row.ids)]
    return [
        Piece(tokenizer.decode(row.ids[start:end].tolist()), bool(row.targets[start]))
        for start, end in pairwise(borders)
        if start < end
    ]


def _lengths(lengths: Sequence[int]) -> dict[str, float]:
    if not lengths:
        return {}
    percentiles = {f"p{share}": length_that_fits(lengths, share / 100) for share in PERCENTILES}
    return {"min": min(lengths), **percentiles, "max": max(lengths), "mean": sum(lengths) / len(lengths)}


def _labels(labels: Sequence[int], preference: PreferenceConfig) -> Labels:
    good, bad = sum(labels), len(labels) - sum(labels)
    set_weights = (preference.desirable_weight, preference.undesirable_weight)
    weights = weight_ranges(good, bad, *set_weights) if good and bad else (None, None)
    return Labels(good, bad, *weights)
