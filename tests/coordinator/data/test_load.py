"""Data are read, refused and described before a model is loaded."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mlxdist.coordinator.data.load import read_splits
from mlxdist.coordinator.data.sources import find
from mlxdist.coordinator.dataset import read
from mlxdist.protocol.errors import ConfigError, DataError
from tests.coordinator.data.data_toys import (
    ToyTokenizer,
    all_shown,
    refusal,
    texts,
    toy_config,
    toy_encoding,
    toy_read,
    write_rows,
)


def test_the_first_ten_faults_are_shown_together_in_the_order_of_their_lines(tmp_path: Path) -> None:
    rows = [{"text": "t" if place % 5 == 0 else place} for place in range(20)]
    said = refusal(tmp_path, rows).splitlines()
    assert said[0] == "16 of 20 rows are faulty, nothing was trained:"
    assert said[1] == "  train.jsonl:2: text is a number (1), not text"
    assert [line.split(":")[1] for line in said[1:11]] == ["2", "3", "4", "5", "7", "8", "9", "10", "12", "13"]
    assert said[11:] == ["  … and 6 more", 'Fix them, or set data.on_bad_row = "skip" to train without them.']


def test_faults_found_before_and_after_tokenizing_stand_in_one_order(tmp_path: Path) -> None:
    rows = [{"prompt": "p" * 30, "completion": "c"}, {"prompt": 1, "completion": "c"}]
    said = refusal(tmp_path, rows, max_length=20).splitlines()
    assert [line.split(":")[1] for line in said[1:3]] == ["1", "2"]


def test_faults_of_training_and_validation_files_are_shown_together(tmp_path: Path) -> None:
    valid = write_rows(tmp_path / "valid.jsonl", [{"text": None}])
    said = refusal(tmp_path, [{"text": 3}], valid_path=str(valid))
    assert "2 of 2 rows are faulty" in said
    assert "train.jsonl:1: text is a number (3), not text" in said
    assert "valid.jsonl:1: sft needs (messages) or (prompt, completion) or (text); the row has text (null)" in said


def test_skipped_rows_are_counted_and_said_and_the_others_keep_their_lines(tmp_path: Path) -> None:
    data = toy_read(tmp_path, [*texts(3), {"text": 5}, *texts(4)], on_bad_row="skip")
    assert data.notes[0] == ("1 of 3 rows is faulty and left out (train.jsonl:2: text is a number (5), not text).")
    assert [data.train.where(index) for index in range(2)] == ["train.jsonl:1", "train.jsonl:3"]


def test_a_file_whose_rows_are_all_skipped_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, [{"text": 5}], on_bad_row="skip") == "train.jsonl has no rows to train on"


def test_mixed_shapes_are_refused_with_the_first_two_lines_that_differ_even_under_skip(tmp_path: Path) -> None:
    rows = [*texts(3, 3), {"prompt": "p", "completion": "c"}, {"text": "t"}]
    for on_bad_row in ("error", "skip"):
        assert "line 1 has (text), line 3 has (prompt, completion)" in refusal(tmp_path, rows, on_bad_row=on_bad_row)


def test_columns_give_our_names_to_the_files_keys(tmp_path: Path) -> None:
    row = {"instruction": "p", "output": "c", "prompt": {"of": "another kind"}}
    columns = {"prompt": "instruction", "completion": "output"}
    assert all_shown(toy_read(tmp_path, [row], columns=columns)) == ["p[c</s>]"]
    said = refusal(tmp_path, [row], columns={"text": "body"})
    assert "there is no 'body', which data.columns reads as text; the row has instruction, output, prompt" in said


@pytest.mark.parametrize(
    ("row", "method", "remedy"),
    [
        ({"question": "p", "answer": "c"}, "sft", 'data.columns = {prompt = "question", completion = "answer"}'),
        (
            *({"instruction": "p", "context": "x", "response": "c"}, "sft"),
            'data.columns = {prompt = ["instruction", "context"], completion = "response"}',
        ),
        ({"dialog": []}, "sft", 'data.columns = {messages = "dialog"}'),
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, "sft", 'which method = "dpo" trains on'),
        ({"prompt": "p", "completion": "a", "label": True}, "dpo", 'which method = "sft" trains on'),
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, "kto", "data.unpair = true makes kto rows of pairs"),
        ({"prompt": "p", "completion": "a", "label": False}, "sft", 'method = "kto" reads it'),
        ({}, "sft", "the row has no keys"),
        ({"x": 1}, "dpo", "dpo needs (prompt, chosen, rejected) or (chosen, rejected); the row has x"),
    ],
)
def test_a_shape_of_another_method_or_tool_is_refused_with_the_remedy(
    tmp_path: Path, row: dict[str, Any], method: str, remedy: str
) -> None:
    assert remedy in refusal(tmp_path, [row], method)


def test_valid_fraction_keeps_rows_back_by_the_seed_without_losing_one(tmp_path: Path) -> None:
    rows = [{"text": f"row {place}"} for place in range(20)]
    data = toy_read(tmp_path, rows, valid_fraction=0.25)
    assert data.valid is not None
    train, valid = ([each.where(index) for index in range(len(each))] for each in (data.train, data.valid))
    assert (len(train), len(valid)) == (15, 5)
    assert sorted(train + valid) == sorted(f"train.jsonl:{line}" for line in range(1, 21))
    assert "5 of 20 rows are kept back for validation (data.valid_fraction)." in data.notes
    again = toy_read(tmp_path, rows, valid_fraction=0.25).valid
    other = toy_read(tmp_path, rows, valid_fraction=0.25, seed=9).valid
    assert again is not None
    assert other is not None
    assert [again.where(index) for index in range(5)] == valid != [other.where(index) for index in range(5)]


def test_the_two_rows_of_an_unpaired_pair_stay_on_the_same_side(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "chosen": f"c{place}", "rejected": "r"} for place in range(9)]
    data = toy_read(tmp_path, rows, "kto", unpair=True, valid_fraction=0.3, size=2)
    assert data.valid is not None
    lines = [data.valid.where(index) for index in range(len(data.valid))]
    assert len(lines) == 6
    assert all(lines.count(line) == 2 for line in lines)


def test_a_valid_file_stands_above_valid_fraction(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", texts(5, 5))
    write_rows(tmp_path / "valid.jsonl", texts(4))
    config = toy_config(tmp_path, valid_fraction=0.5)
    data = read_splits(find(config.data.path), toy_encoding(config), progress=lambda message, share: None)
    assert data.valid is not None
    assert (len(data.train), len(data.valid)) == (2, 1)
    assert "Validation rows come from valid.jsonl; data.valid_fraction keeps none back." in data.notes


def test_one_row_is_never_split_away_and_an_empty_validation_is_said(tmp_path: Path) -> None:
    data = toy_read(tmp_path, texts(5), valid_fraction=0.9)
    assert (len(data.train), data.valid) == (1, None)
    assert "One row cannot be split: data.valid_fraction keeps none back." in data.notes
    valid = write_rows(tmp_path / "valid.jsonl", [{"text": 5}])
    data = toy_read(tmp_path, texts(5), valid_path=str(valid), on_bad_row="skip")
    assert data.valid is None
    assert "valid.jsonl has no rows: there will be no validation." in data.notes


def test_progress_names_the_file_and_ends_at_one(tmp_path: Path) -> None:
    config = toy_config(write_rows(tmp_path / "train.jsonl", texts(*[4] * 2500)))
    seen: list[tuple[str, float]] = []
    read_splits(find(config.data.path), toy_encoding(config), progress=lambda *event: seen.append(event))
    assert [message for message, _ in seen] == ["reading train.jsonl"] * 3
    assert [round(share, 2) for _, share in seen] == [0.41, 0.82, 1.0]


@dataclass(frozen=True)
class WatchedTokenizer(ToyTokenizer):
    """Notes how many texts and characters it is given at once."""

    calls: list[tuple[int, int]] = field(default_factory=list)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        self.calls.append((len(texts), sum(map(len, texts))))
        return [[7] * len(text) for text in texts]


@pytest.mark.parametrize(("rows", "length"), [(3000, 2), (8, 300_000)])
def test_rows_are_encoded_in_batches_that_neither_many_nor_long_rows_make_large(
    tmp_path: Path, rows: int, length: int
) -> None:
    watched = WatchedTokenizer()
    data = toy_read(tmp_path, texts(*[length] * rows), tokenizer=watched, max_cut=1.0)
    assert len(data.train) == rows
    assert max(count for count, _ in watched.calls) <= 1024
    assert max(characters for _, characters in watched.calls) <= 2**20 + length


def test_the_digest_of_the_data_is_the_same_for_the_same_rows_only(tmp_path: Path) -> None:
    def digests(*lengths: int, **values: Any) -> list[str]:
        data = toy_read(tmp_path, texts(*lengths), **values)
        return [data.digest, data.valid_digest]

    assert digests(4, 5) == digests(4, 5) == [digests(4, 5)[0], ""]
    assert digests(4, 5) != digests(5, 4)
    first, second = (str(write_rows(tmp_path / f"v{each}.jsonl", texts(each))) for each in (6, 7))
    assert digests(4, 5, valid_path=first) == digests(4, 5, valid_path=first)
    assert [a == b for a, b in zip(digests(4, 5, valid_path=first), digests(4, 5, valid_path=second), strict=True)] == [
        True,
        False,
    ]
    # other rows of one file are kept back
    split = [digests(*range(4, 14), valid_fraction=part) for part in (0.2, 0.3)]
    assert all(a != b for a, b in zip(*split, strict=True))


def test_a_model_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty-model").mkdir()
    data = write_rows(tmp_path / "train.jsonl", texts(5))
    config = toy_config(data)
    object.__setattr__(config, "model", str(tmp_path / "empty-model"))
    with pytest.raises(ConfigError, match=r"empty-model.* has no tokenizer that can be read"):
        read(config, progress=lambda message, share: None)


def test_data_is_looked_for_before_the_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl does not exist"):
        read(toy_config(tmp_path / "rows.jsonl"), progress=lambda message, share: None)


def test_a_row_of_a_hundred_thousand_tokens_is_read_and_cut(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "t" * 100_000}))
    config = toy_config(tmp_path / "train.jsonl", max_cut=1.0)
    data = read_splits(find(config.data.path), toy_encoding(config), progress=lambda message, share: None)
    assert (data.train.lengths.tolist(), len(data.train.rows(0)[0].ids)) == ([100_001], 1024)
