"""Rows in compact arrays come out as they went in, wherever they lie in memory."""

import numpy as np
import pytest

from mlxdist.coordinator.batch import row_store as rows
from mlxdist.coordinator.batch.row_store import RowStore, StoredRows, pack, unpack


def test_a_word_holds_its_id_and_its_target_flag() -> None:
    row = unpack(7, pack([5, 2**31 - 1, 0, 9], [(0, 2), (3, 4)]))
    assert (row.row_id, row.ids.tolist(), row.targets.tolist()) == (7, [5, 2**31 - 1, 0, 9], [0, 1, 0, 1])


def test_rows_that_lie_across_blocks_come_out_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "BLOCK", 8)
    store = RowStore("a.jsonl", "sft", 99)
    sizes = [3, 8, 1, 20, 8, 5, 0, 16]
    for line, size in enumerate(sizes, start=1):
        store.add(line, [pack(range(100 * line, 100 * line + size), [(1, size)])], size)
    data = StoredRows(store)
    for index, size in enumerate(sizes):
        (row,) = data.rows(index)
        assert row.ids.tolist() == list(range(100 * (index + 1), 100 * (index + 1) + size))
        assert row.targets.tolist() == [0, *[1] * (size - 1)][:size]
    assert data.lengths.tolist() == sizes


def test_a_stored_token_takes_four_bytes_and_a_row_a_few_more() -> None:
    store = RowStore("a.jsonl", "sft", 4096)
    for line in range(2000):
        store.add(line, [np.zeros(1000, dtype=np.uint32)], 1000)
    assert store.nbytes <= 4 * (2_000_000 + rows.BLOCK) + 32 * 2000


def test_picked_rows_keep_their_line_length_label_and_id() -> None:
    store = RowStore("a.jsonl", "kto", 10)
    for line in range(5):
        store.add(line + 1, [pack([line], []), pack([9], [(0, 1)])], line + 10, label=line % 2 == 1)
    picked = StoredRows(store, [3, 1])
    assert (len(picked), picked.lengths.tolist()) == (2, [13, 11])
    assert picked.labels is not None
    assert picked.labels.tolist() == [1, 1]
    assert (picked.where(0), picked.rows(0)[0].row_id, picked.rows(0)[0].ids.tolist()) == ("a.jsonl:4", 3, [3, 9])


def test_the_digest_tells_every_token_target_and_label() -> None:
    def digest(*parts: list[int], label: bool = False, span: int = 0) -> str:
        store = RowStore("a.jsonl", "sft", 10)
        for part in parts:
            store.add(1, [pack(part, [(span, 9)])], 1, label=label)
        return store.digest

    same, *others = (
        digest([1, 2], [3]),
        digest([1], [2, 3]),
        digest([1, 2, 3]),
        digest([1, 2], [4]),
        digest([1, 2], [3], label=True),
        digest([1, 2], [3], span=1),
    )
    assert same == digest([1, 2], [3])
    assert len({same, *others}) == 6
