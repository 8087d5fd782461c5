"""The reference trainer's batches, padded lists of ids. Their order is the run's own (batch_order.py).

Shapes: B rows of a batch, L tokens of its width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlxdist.coordinator.batch.batch_order import Window, epochs
from mlxdist.coordinator.dataset import DpoExample, KtoExample, SftExample
from mlxdist.protocol.errors import DataError

PAD_TO = 32


@dataclass(frozen=True, slots=True)
class SftBatch:
    """Rows padded on the right to one width; targets of row b: prompt_lens[b] <= index < lengths[b]."""

    ids: list[list[int]]  # [B, L]
    prompt_lens: list[int]
    lengths: list[int]  # true tokens of each row, after the cut


@dataclass(frozen=True, slots=True)
class DpoBatch:
    """Pairs; chosen and rejected each padded to their own longest row, masks 1 at the response's tokens."""

    chosen_ids: list[list[int]]
    chosen_mask: list[list[int]]
    chosen_lengths: list[int]
    rejected_ids: list[list[int]]
    rejected_mask: list[list[int]]
    rejected_lengths: list[int]


@dataclass(frozen=True, slots=True)
class KtoBatch:
    """Rows of either label, padded on the right to the longest, masks 1 at the completion's tokens."""

    ids: list[list[int]]
    mask: list[list[int]]
    lengths: list[int]
    labels: list[bool]  # True: desirable


def iterate_sft_batches(
    examples: Sequence[SftExample], batch_size: int, max_seq_length: int, seed: int, loop: bool, pad_id: int = 0
) -> Iterator[SftBatch]:
    """Windows of like length, shuffled each epoch; rows past `max_seq_length` cut on the right. The tail is dropped.

    Raises DataError for fewer examples than `batch_size`.
    """
    for window in _windows([len(example.ids) for example in examples], batch_size, "sorted", seed, loop):
        rows = [examples[row] for row in window]
        ids = [row.ids[:max_seq_length] for row in rows]
        lengths = [len(row) for row in ids]
        width = lengths[0] if batch_size == 1 else min(1 + PAD_TO * -(-max(lengths) // PAD_TO), max_seq_length)
        # a row that was cut keeps one target; the others keep the boundary that they came with
        prompt_lens = [
            min(row.prompt_len, max(max_seq_length - 1, 0)) if len(row.ids) > max_seq_length else row.prompt_len
            for row in rows
        ]
        yield SftBatch([_padded(row, width, pad_id) for row in ids], prompt_lens, lengths)


def iterate_dpo_batches(
    examples: Sequence[DpoExample], batch_size: int, seed: int, loop: bool, pad_id: int = 0
) -> Iterator[DpoBatch]:
    """Pairs in an order reshuffled each epoch. The tail is dropped. Raises DataError for fewer than `batch_size`."""
    for window in _windows([0] * len(examples), batch_size, "shuffled", seed, loop):
        rows = [examples[row] for row in window]
        chosen, rejected = [row.chosen_ids for row in rows], [row.rejected_ids for row in rows]
        yield DpoBatch(
            chosen_ids=_padded_all(chosen, pad_id),
            chosen_mask=_padded_all([row.chosen_mask for row in rows], 0),
            chosen_lengths=[len(ids) for ids in chosen],
            rejected_ids=_padded_all(rejected, pad_id),
            rejected_mask=_padded_all([row.rejected_mask for row in rows], 0),
            rejected_lengths=[len(ids) for ids in rejected],
        )


def iterate_kto_batches(
    examples: Sequence[KtoExample], batch_size: int, seed: int, loop: bool, pad_id: int = 0
) -> Iterator[KtoBatch]:
    """Rows in the order of `iterate_dpo_batches`. Raises DataError for fewer than `batch_size`."""
    for window in _windows([0] * len(examples), batch_size, "shuffled", seed, loop):
        rows = [examples[row] for row in window]
        yield KtoBatch(
            ids=_padded_all([row.ids for row in rows], pad_id),
            mask=_padded_all([row.mask for row in rows], 0),
            lengths=[len(row.ids) for row in rows],
            labels=[row.label for row in rows],
        )


def _windows(lengths: Sequence[int], size: int, order: str, seed: int, loop: bool) -> Iterator[Window]:
    if size < 1 or len(lengths) < size:
        raise DataError(f"{len(lengths)} examples make no batch of {size}: give 1 to {len(lengths)}")
    for windows in epochs(lengths, size, order=order, remainder="drop", seed=seed):
        yield from windows
        if not loop:
            return


def _padded(row: list[int], width: int, fill: int) -> list[int]:
    return row + [fill] * (width - len(row))


def _padded_all(rows: Sequence[list[int]], fill: int) -> list[list[int]]:
    width = max(len(row) for row in rows)
    return [_padded(row, width, fill) for row in rows]
