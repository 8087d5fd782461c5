"""Notes and refusals before the first step: rows that are cut, left out or alone in a step, and classes."""

from pathlib import Path
from typing import Any

import pytest

from tests.coordinator.data.data_toys import all_shown, refusal, texts, toy_read, write_rows


def test_too_many_cut_rows_are_refused_with_the_lengths_that_fit(tmp_path: Path) -> None:
    rows = texts(*range(11, 111))  # 100 rows of 11 to 110 tokens
    assert refusal(tmp_path, rows, max_length=50) == (
        "60 of 100 rows (60 %) are longer than batch.max_length = 50 tokens and would be cut, more than batch.max_cut "
        "= 0.1 allows: batch.max_length = 100 fits 90 % of the rows, 109 fits 99 %, 110 fits all; "
        "or raise batch.max_cut"
    )
    data = toy_read(tmp_path, rows, max_length=100)
    assert data.notes[0] == (
        "10 of 100 rows (10 %) are longer than batch.max_length = 100 and cut on the right; "
        "batch.max_length = 100 fits 90 % of the rows, 109 fits 99 %, 110 fits all."
    )
    assert toy_read(tmp_path, rows, max_length=110).notes[:1] != data.notes[:1]


def test_validation_rows_that_are_cut_are_said_and_refuse_no_run(tmp_path: Path) -> None:
    valid = write_rows(tmp_path / "valid.jsonl", texts(12, 30, 40))
    notes = toy_read(tmp_path, texts(11, 12), max_length=20, valid_path=str(valid)).notes
    assert notes == ("2 of 3 validation rows (67 %) are longer than batch.max_length = 20 and cut on the right.",)
    pairs = [{"prompt": "p" * 30, "chosen": "c", "rejected": "r"}]
    valid = write_rows(tmp_path / "valid.jsonl", pairs)
    data = toy_read(tmp_path, [{**pairs[0], "prompt": "p"}] * 2, "dpo", size=2, max_length=20, valid_path=str(valid))
    said = "1 of 1 validation row (100 %) is longer than batch.max_length = 20 and cut at the start of the prompt."
    assert said in data.notes
    fits = write_rows(tmp_path / "fits.jsonl", texts(12))
    assert toy_read(tmp_path, texts(11, 12), max_length=20, valid_path=str(fits)).notes == ()


def test_rows_too_long_to_train_count_as_cut_even_when_they_are_skipped(tmp_path: Path) -> None:
    rows = [{"prompt": "p" * (50 if place % 2 else 5), "completion": "c"} for place in range(10)]
    assert "5 of 10 rows (50 %)" in refusal(tmp_path, rows, max_length=20, on_bad_row="skip")


def test_a_preference_row_that_loses_its_whole_prompt_is_counted(tmp_path: Path) -> None:
    rows = [
        {"prompt": "prompt", "chosen": "c" * 30, "rejected": "r"},
        {"prompt": "prompt", "chosen": "c", "rejected": "r"},
    ]
    data = toy_read(tmp_path, rows, "dpo", size=2, max_length=20, max_cut=1.0)
    assert (
        "1 row has a response that fills batch.max_length = 20 by itself: its prompt is cut away entirely."
        in data.notes
    )


@pytest.mark.parametrize(
    ("count", "method", "values", "note"),
    [
        (
            *(406, "sft", {"size": 8}),
            '6 of 406 rows fill no window of 8 and are never trained; batch.remainder = "keep" trains them.',
        ),
        (
            *(9, "sft", {"size": 8}),
            '1 of 9 rows fills no window of 8 and is never trained; batch.remainder = "keep" trains it.',
        ),
        (
            *(9, "dpo", {"size": 8}),
            "1 of 9 pairs fills no window of 8 and sits out each epoch, others every time; "
            'batch.remainder = "keep" trains it.',
        ),
        (3, "sft", {"size": 8, "remainder": "keep"}, "3 rows do not fill a window of 8: each step takes them all."),
        (10, "sft", {"size": 2, "grad_accum_steps": 2}, "The last step of each epoch has 1 window instead of 2."),
        (
            *(400, "sft", {"size": 1}),
            "100 of the 400 steps of an epoch are taken: about 25 % of the rows are trained; "
            "train.epochs = 1.0 would train all.",
        ),
    ],
)
def test_what_is_never_trained_is_said_at_the_start(
    tmp_path: Path, count: int, method: str, values: dict[str, Any], note: str
) -> None:
    row = {"text": "tt"} if method == "sft" else {"prompt": "p", "chosen": "a", "rejected": "b"}
    assert note in toy_read(tmp_path, [row] * count, method, **values).notes


def test_nothing_is_said_where_every_row_is_trained_as_it_is(tmp_path: Path) -> None:
    assert toy_read(tmp_path, texts(*[5] * 16), size=8).notes == ()


def test_fewer_rows_than_a_window_are_refused_under_drop_with_the_cure(tmp_path: Path) -> None:
    assert "1 row fills no window of batch.size = 8, so nothing would be trained: set batch.size to 1, or" in refusal(
        tmp_path, texts(3), size=8
    )
    said = refusal(tmp_path, texts(3, 3, 3), size=8)
    assert 'set batch.size to 3 or less, or batch.remainder = "keep"' in said


def test_one_row_is_a_run(tmp_path: Path) -> None:
    data = toy_read(tmp_path, texts(5), size=8, remainder="keep")
    assert all_shown(data) == ["t[ttt</s>]"]


@pytest.mark.parametrize(
    ("count", "values"),
    [
        (1, {"size": 2, "remainder": "keep"}),
        (7, {"size": 1, "grad_accum_steps": 3}),
    ],
)
def test_a_kto_step_of_one_row_is_refused_with_the_cure(tmp_path: Path, count: int, values: dict[str, Any]) -> None:
    rows = [{"prompt": "p", "completion": "c", "label": 1}] * count
    assert "set batch.size to 2 or more" in refusal(tmp_path, rows, "kto", **values)


@pytest.mark.parametrize(
    ("good", "bad", "note"),
    [
        (4, 0, "All 4 rows are desirable: kto works with one class, and better with both."),
        (
            *(2, 6),
            "The data has 2 desirable and 6 undesirable rows, and the weights do not balance them: set either "
            "preference.desirable_weight from 3 to 3.99 or preference.undesirable_weight from 0.25 to 0.33, not both.",
        ),
    ],
)
def test_classes_out_of_balance_get_trls_ranges_of_weights(tmp_path: Path, good: int, bad: int, note: str) -> None:
    rows = [{"prompt": "p", "completion": "c", "label": place < good} for place in range(good + bad)]
    assert note in toy_read(tmp_path, rows, "kto", size=2).notes


def test_classes_within_trls_range_need_no_word(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": "c", "label": place < 4} for place in range(7)]
    assert not any("desirable" in note for note in toy_read(tmp_path, rows, "kto", size=7).notes)
