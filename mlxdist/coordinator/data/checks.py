"""Sentences on the data for before the first step: what is cut, left out, kept back or never read. Refusals too."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from mlxdist.coordinator.batch.batch_order import steps_per_epoch, total_steps, windows_per_epoch
from mlxdist.coordinator.batch.row_store import Rows
from mlxdist.coordinator.config.advice import kto_weights_advice
from mlxdist.coordinator.config.schema import BatchConfig, PreferenceConfig, RunConfig
from mlxdist.coordinator.data.columns import sources
from mlxdist.coordinator.encode.row_formats import SHAPES, ColumnNames, columns_said
from mlxdist.protocol.errors import DataError
from mlxdist.protocol.methods import METHODS

MOST_COLUMNS = 8  # columns or files that one sentence names
FITS = (0.9, 0.99, 1.0)  # shares of the rows whose lengths are named


def length_that_fits(lengths: Sequence[int], share: float) -> int:
    """The smallest max_length in tokens that leaves at least `share` of the rows uncut."""
    return int(np.sort(lengths)[max(-(-round(share * 1000) * len(lengths) // 1000), 1) - 1])


def fits_phrase(lengths: Sequence[int]) -> str:
    """'batch.max_length = 512 fits 90 % of the rows, 700 fits 99 %, 812 fits all'."""
    ninety, most, every = (length_that_fits(lengths, share) for share in FITS)
    return f"batch.max_length = {ninety} fits 90 % of the rows, {most} fits 99 %, {every} fits all"


def cut_notes(lengths: Sequence[int], batch: BatchConfig, method: str) -> list[str]:
    """The sentence on rows that are cut. Raises DataError for more than `max_cut` of them."""
    tokens = np.asarray(lengths, dtype=np.int32)
    n_cut = int((tokens > batch.max_length).sum())
    if not n_cut:
        return []
    part = f"{n_cut} of {_rows(len(tokens))} ({percent(n_cut, len(tokens))})"
    if n_cut > batch.max_cut * len(tokens):
        raise DataError(
            f"{part} are longer than batch.max_length = {batch.max_length} tokens and would be cut, "
            f"more than batch.max_cut = {batch.max_cut} allows: {fits_phrase(lengths)}; or raise batch.max_cut"
        )
    return [f"{part} {_cut(n_cut, batch, method)}; {fits_phrase(lengths)}."]


def valid_cut_notes(lengths: Sequence[int], batch: BatchConfig, method: str) -> list[str]:
    """The sentence on validation rows that are cut; it refuses no run, as nothing is trained on them."""
    n_cut = sum(length > batch.max_length for length in lengths)
    if not n_cut:
        return []
    part = f"{n_cut} of {_rows(len(lengths), 'validation rows')} ({percent(n_cut, len(lengths))})"
    return [f"{part} {_cut(n_cut, batch, method)}."]


def prompt_notes(data: Rows, max_length: int, n_bos: int) -> list[str]:
    """Preference rows whose response alone fills `max_length`, so that it is trained without its prompt."""
    lost = 0
    for index in np.flatnonzero(data.lengths > max_length):
        # with one token of prompt or with none the first target is the same: nothing worth reading is before it
        lost += any(row.targets[: 2 + n_bos].any() for row in data.rows(int(index)))
    if not lost:
        return []
    whose = "1 row has a response that fills" if lost == 1 else f"{lost} rows have a response that fills"
    return [f"{whose} batch.max_length = {max_length} by itself: its prompt is cut away entirely."]


def naming_notes(name: str, known: str, named: ColumnNames, columns: Mapping[str, int]) -> Iterator[str]:
    """The way of writing that the rows of a file were recognized by.

    `columns` are all that its rows have. Raises DataError for one that data.columns joins and no row has.
    """
    if known:
        there = {ours: tuple(key for key in sources(named, ours) if key in columns) for ours in named}
        yield f"{name} is written as {known} files are, and read with data.columns = {columns_said(there)}."
        return
    for ours in named:
        for theirs in sources(named, ours):
            if columns and theirs not in columns:
                raise DataError(f"{name}: no row has {theirs!r}, which data.columns joins into {ours}")


def unread_notes(name: str, shape: str, n_rows: int, named: ColumnNames, columns: Mapping[str, int]) -> Iterator[str]:
    """The columns of a file with text that nothing reads, each with its share of the `n_rows` good rows."""
    unread = {key: count for key, count in columns.items() if count}
    if not unread:
        return
    said = [
        f"{key or 'a column without a name'} ({percent(count, n_rows)} of the rows)"
        for key, count in sorted(unread.items())
    ]
    more = f" and {len(said) - MOST_COLUMNS} more" if len(said) > MOST_COLUMNS else ""
    sentence = f"{name} has text that nothing reads, in {', '.join(said[:MOST_COLUMNS])}{more}"
    ours = {ours: named.get(ours, ours) for ours in SHAPES[shape]}
    needed = {key: theirs for key, theirs in ours.items() if key == "prompt" or theirs != key}
    joined = columns_said(needed, unread)
    advice = f"; data.columns = {joined} would join it to the prompt" if joined != columns_said(needed) else ""
    yield f"{sentence}{advice}."


def file_notes(unread: Sequence[str]) -> list[str]:
    """The files beside the training rows that look like rows, too, and belong to no split of the run."""
    if not unread:
        return []
    shown = ", ".join(unread[:MOST_COLUMNS]) + (
        f" and {len(unread) - MOST_COLUMNS} more" if len(unread) > MOST_COLUMNS else ""
    )
    return [f"Beside the training rows, nothing reads {shown} (data.valid_path names a validation file)."]


def order_notes(n_rows: int, config: RunConfig) -> list[str]:
    """The sentences on rows and windows that the order leaves out or makes short.

    Raises DataError where nothing, or a lone row of a method that compares rows, would make a step.
    """
    batch, method, spec = config.batch, config.method, METHODS[config.method]
    unit = f"{spec.item}s"
    if n_rows < batch.size and batch.remainder == "drop":
        verb = "fills" if n_rows == 1 else "fill"
        fewer = "1" if n_rows == 1 else f"{n_rows} or less"
        raise DataError(
            f"{_rows(n_rows, unit)} {verb} no window of batch.size = {batch.size}, so nothing would be trained: "
            f'set batch.size to {fewer}, or batch.remainder = "keep"'
        )
    if not spec.lone_row:
        _refuse_lone_row(n_rows, batch, method)
    notes = []
    tail = n_rows % batch.size
    if n_rows < batch.size:
        notes.append(f"{_rows(n_rows, unit)} do not fill a window of {batch.size}: each step takes them all.")
    elif tail and batch.remainder == "drop":
        verb = "fills" if tail == 1 else "fill"
        fate = "are never trained" if batch.order == "sorted" else "sit out each epoch, others every time"
        fate = fate.replace("are", "is").replace("sit", "sits") if tail == 1 else fate
        notes.append(
            f"{tail} of {n_rows} {unit} {verb} no window of {batch.size} and {fate}; "
            f'batch.remainder = "keep" trains {"it" if tail == 1 else "them"}.'
        )
    short = windows_per_epoch(n_rows, batch, method) % batch.grad_accum_steps
    if short:
        windows = "1 window" if short == 1 else f"{short} windows"
        notes.append(f"The last step of each epoch has {windows} instead of {batch.grad_accum_steps}.")
    per_epoch = steps_per_epoch(n_rows, batch, method)
    steps = total_steps(config.train, n_rows, batch, method)
    if steps is not None and steps < per_epoch:
        notes.append(
            f"{steps} of the {per_epoch} steps of an epoch are taken: about {round(100 * steps / per_epoch)} % of the "
            f"{unit} are trained; train.epochs = 1.0 would train all."
        )
    return notes


def balance_notes(labels: npt.NDArray[np.uint8], preference: PreferenceConfig) -> list[str]:
    """KTO: one class alone, or weights that balance the two where they are out of TRL's range."""
    if len(set(labels.tolist())) == 1:
        only = "desirable" if labels[0] else "undesirable"
        return [f"All {len(labels)} rows are {only}: kto works with one class, and better with both."]
    advice = kto_weights_advice(labels, preference.desirable_weight, preference.undesirable_weight)
    return [advice] if advice else []


def percent(part: int, whole: int) -> str:
    """'3 %', '0.2 %' below one."""
    share = 100 * part / whole
    return f"{share:.1f} %" if 0 < share < 1 else f"{share:.0f} %"


def _refuse_lone_row(n_rows: int, batch: BatchConfig, method: str) -> None:
    windows = windows_per_epoch(n_rows, batch, method)
    last = windows % batch.grad_accum_steps or batch.grad_accum_steps
    if n_rows == 1 or (batch.size == 1 and last == 1):
        raise DataError(
            f"the last step of an epoch would hold one of {_rows(n_rows)}, and {method} takes its reference point "
            "from the other rows of the step: set batch.size to 2 or more" + (", and add rows" if n_rows == 1 else "")
        )


def _cut(count: int, batch: BatchConfig, method: str) -> str:
    side = "on the right" if METHODS[method].cut == "right" else "at the start of the prompt"
    return f"{'is' if count == 1 else 'are'} longer than batch.max_length = {batch.max_length} and cut {side}"


def _rows(count: int, unit: str = "rows") -> str:
    return f"1 {unit[:-1]}" if count == 1 else f"{count} {unit}"
