"""The rows of a run in compact arrays: one 32-bit word per token, its id and, in the top bit, whether it is a target.

Shapes: N rows (or pairs) of a data set, T tokens of a sequence. `MethodSpec.stored` names the sequences of a row: for
DPO chosen and rejected, for KTO prompt and completion.
"""

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mlxdist.protocol.leaves import Row
from mlxdist.protocol.methods import METHODS

Words = npt.NDArray[np.uint32]
Spans = Iterable[tuple[int, int]]

TARGET = np.uint32(1 << 31)
BLOCK = 1 << 20  # words of one block, 4 MiB


class Rows(Protocol):
    """The data as the order, the leaves and the loop see it."""

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """[N] tokens of each row before any cut, of a pair the longer branch. The order sorts by them."""
        ...

    @property
    def labels(self) -> npt.NDArray[np.uint8] | None:
        """[N] 1 desirable, 0 undesirable; None for a method without labels."""
        ...

    def __len__(self) -> int:
        """N."""
        ...

    def rows(self, index: int) -> tuple[Row, ...]:
        """Returns the row, or chosen and rejected, with at most `max_length` tokens each."""
        ...

    def where(self, index: int) -> str:
        """Returns file and line: "train.jsonl:12"."""
        ...


class PairedRows(Rows, Protocol):
    """KTO rows: prompts and completions are stored apart."""

    def joined(self, prompt_of: int, completion_of: int) -> Row:
        """Returns the prompt of one row with the completion of another, trimmed to `max_length` as any row."""
        ...


def pack(ids: Sequence[int], spans: Spans) -> Words:
    """Returns ids [T] as words; those inside a span (start, end) are marked as targets."""
    words = np.array(ids, dtype=np.uint32)
    for start, end in spans:
        words[start:end] |= TARGET
    return words


def unpack(row_id: int, words: Words) -> Row:
    """Returns words [T] as a row. The first token has nothing before it and is never a target."""
    targets = (words >> np.uint32(31)).astype(np.uint8)
    targets[:1] = 0
    return Row(row_id, (words & ~TARGET).astype(np.int32), targets)


class RowStore:
    """Rows as they are read, in file order. It grows by blocks, so that no array is copied to grow."""

    def __init__(self, name: str, method: str, max_length: int, bos_id: int | None = None) -> None:
        """`name` is the file's, for `where`. `bos_id` starts rows whose prompt is stored apart, and without it."""
        self.name, self.spec, self.max_length, self.bos_id = name, METHODS[method], max_length, bos_id
        self.lines, self.lengths, self.labels = array("q"), array("i"), array("b")
        self.sides = array("b")  # 1: the second row of its line (an unpaired rejected)
        self._files = [(0, name)]  # the first row of each file, where the source has several
        self._parts = len(self.spec.stored)
        self._blocks: list[Words] = []
        self._ends = array("q", [0])  # of each sequence, in words from the first
        self._digest = hashlib.sha256()

    def __len__(self) -> int:
        return len(self.lines)

    @property
    def nbytes(self) -> int:
        """Memory of all arrays in bytes."""
        small = (self.lines, self.lengths, self.labels, self.sides, self._ends)
        return sum(block.nbytes for block in self._blocks) + sum(len(each) * each.itemsize for each in small)

    @property
    def digest(self) -> str:
        """SHA-256 over every token and target so far: equal for equal data, tokenizer and settings."""
        return self._digest.hexdigest()

    def begin(self, file: str) -> None:
        """The rows to come are of `file`, if it is given: of a source of several files."""
        if file and file != self._files[-1][1]:
            self._files.append((len(self), file))

    def where(self, row: int) -> str:
        """File and line of row `row` of the store."""
        return f"{self._files[bisect_right(self._files, row, key=itemgetter(0)) - 1][1]}:{self.lines[row]}"

    def add(self, line: int, parts: Sequence[Words], length: int, *, label: bool = False, side: int = 0) -> None:
        """Adds one row from `line` of the file: its sequences, its tokens before any cut, its label."""
        assert len(parts) == self._parts, f"{self.spec.name} rows have {self._parts} sequences, not {len(parts)}"
        for words in parts:
            self._append(words)
        self._digest.update(bytes([label]))
        self.lines.append(line)
        self.lengths.append(length)
        self.labels.append(label)
        self.sides.append(side)

    def sequences(self, index: int) -> tuple[Words, ...]:
        """Returns the stored sequences of row `index`."""
        first = index * self._parts
        return tuple(self._words(first + part) for part in range(self._parts))

    def _append(self, words: Words) -> None:
        self._digest.update(len(words).to_bytes(8, "little"))
        self._digest.update(np.ascontiguousarray(words, dtype="<u4").tobytes())
        end, done = self._ends[-1], 0
        while done < len(words):
            block, offset = divmod(end + done, BLOCK)
            if block == len(self._blocks):
                self._blocks.append(np.empty(BLOCK, dtype=np.uint32))
            taken = min(len(words) - done, BLOCK - offset)
            self._blocks[block][offset : offset + taken] = words[done : done + taken]
            done += taken
        self._ends.append(end + len(words))

    def _words(self, sequence: int) -> Words:
        start, end = self._ends[sequence], self._ends[sequence + 1]
        pieces = [
            self._blocks[block][max(start - block * BLOCK, 0) : end - block * BLOCK]
            for block in range(start // BLOCK, -(-end // BLOCK))
        ]
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.uint32)


class StoredRows:
    """Some or all rows of a store, in the order of `picks`. Implements `PairedRows`."""

    def __init__(self, store: RowStore, picks: Sequence[int] | None = None) -> None:
        self._store = store
        self._picks = np.arange(len(store)) if picks is None else np.asarray(picks, dtype=np.int64)
        self._lengths = np.frombuffer(store.lengths, dtype=np.int32)[self._picks] if len(store) else _EMPTY
        self._labels = np.frombuffer(store.labels, dtype=np.uint8)[self._picks] if len(store) else None

    def __len__(self) -> int:
        return len(self._picks)

    @property
    def digest(self) -> str:
        """SHA-256 over every token and target of the store, and the indices of these rows in it."""
        picks = np.ascontiguousarray(self._picks, dtype="<i8").tobytes()
        return hashlib.sha256(self._store.digest.encode() + picks).hexdigest()

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """[N] tokens before any cut."""
        return self._lengths

    @property
    def labels(self) -> npt.NDArray[np.uint8] | None:
        """[N] 1 desirable; None for a method without labels."""
        return self._labels if self._store.spec.labels else None

    def rows(self, index: int) -> tuple[Row, ...]:
        """Returns the row, or chosen and rejected."""
        if self._store.spec.prompt_apart:
            return (self.joined(index, index),)
        row_id = self._row_id(index)
        return tuple(unpack(row_id, words) for words in self._store.sequences(int(self._picks[index])))

    def joined(self, prompt_of: int, completion_of: int) -> Row:
        """Returns a prompt, trimmed on the left to the room that `max_length` leaves, and a completion."""
        store = self._store
        prompt = store.sequences(int(self._picks[prompt_of]))[0]
        completion = store.sequences(int(self._picks[completion_of]))[1]
        bos = np.array([] if store.bos_id is None else [store.bos_id], dtype=np.uint32)
        room = max(store.max_length - len(bos) - len(completion), 0)
        return unpack(self._row_id(prompt_of), np.concatenate([bos, prompt[max(len(prompt) - room, 0) :], completion]))

    def where(self, index: int) -> str:
        """Returns file and line."""
        return self._store.where(int(self._picks[index]))

    def _row_id(self, index: int) -> int:
        return int(self._picks[index])


_EMPTY = np.empty(0, dtype=np.int32)
