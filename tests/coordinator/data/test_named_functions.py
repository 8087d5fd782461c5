"""The named functions give the reference trainer's results, id by id (golden/dataset.json: made by running it)."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from mlxdist.coordinator.batches import iterate_dpo_batches, iterate_kto_batches, iterate_sft_batches
from mlxdist.coordinator.dataset import (
    DpoExample,
    KtoExample,
    SftExample,
    encode_dpo_row,
    encode_sft_row,
    probe_format,
    sft_row_format,
    tokenize_pair,
)
from mlxdist.protocol.errors import DataError

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "dataset.json").read_text(encoding="utf-8"))
MERGES = {"ab": 9001, " c": 9002}


class GoldenTokenizer:
    """One id per character code, but two merges, greedy from the left: what the golden file was made with."""

    def encode(self, text: str) -> list[int]:
        ids, place = [], 0
        while place < len(text):
            pair = text[place : place + 2]
            ids.append(MERGES.get(pair) or ord(text[place]))
            place += 2 if pair in MERGES else 1
        return ids


class GoldenTemplate:
    """<role>content</> per message, then <assistant> for a generation prompt."""

    def render(self, messages: Any, add_generation_prompt: bool, **kwargs: Any) -> str:
        text = "".join(f"<{message['role']}>{message['content']}</>" for message in messages)
        return text + ("<assistant>" if add_generation_prompt else "")


TOK, TEMPLATE = GoldenTokenizer(), GoldenTemplate()


def named(case: str) -> list[Any]:
    return [pytest.param(entry, id=f"{case}-{place}") for place, entry in enumerate(GOLDEN[case])]


@pytest.mark.parametrize("case", named("tokenize_pair"))
def test_prompt_and_response_are_joined_and_cut_as_the_reference_does(case: dict[str, Any]) -> None:
    assert tokenize_pair(case["prompt"], case["response"], TOK, case["max_length"]) == (case["ids"], case["promptLen"])


@pytest.mark.parametrize("case", named("sft_rows"))
def test_an_sft_row_has_the_reference_ids_and_boundary(case: dict[str, Any]) -> None:
    assert sft_row_format(case["row"]) == case["format"] == probe_format(case["row"])
    assert encode_sft_row(case["row"], TOK, TEMPLATE) == SftExample(case["ids"], case["promptLen"])


@pytest.mark.parametrize("case", named("dpo_rows"))
def test_a_pair_has_the_reference_ids_and_masks(case: dict[str, Any]) -> None:
    expected = DpoExample(case["chosenIds"], case["rejectedIds"], case["chosenMask"], case["rejectedMask"])
    assert encode_dpo_row(case["row"], TOK, TEMPLATE, case["max_length"]) == expected


@pytest.mark.parametrize("case", named("sft"))
def test_sft_batches_have_the_reference_order_widths_and_boundaries(case: dict[str, Any]) -> None:
    examples = [SftExample(example["ids"], example["promptLen"]) for example in case["examples"]]
    arguments = (examples, case["batch_size"], case["max_seq_length"], case["seed"])
    batches = islice(iterate_sft_batches(*arguments, case["loop"], case["pad_id"]), case["count"])
    assert [(b.ids, b.prompt_lens, b.lengths) for b in batches] == [
        (b["ids"], b["promptLens"], b["lengths"]) for b in case["batches"]
    ]
    assert len(list(iterate_sft_batches(*arguments, False, case["pad_id"]))) == case["one_epoch"]


@pytest.mark.parametrize("case", named("dpo"))
def test_dpo_batches_have_the_reference_order_and_each_branch_its_own_width(case: dict[str, Any]) -> None:
    examples = [
        DpoExample(e["chosenIds"], e["rejectedIds"], e["chosenMask"], e["rejectedMask"]) for e in case["examples"]
    ]
    endless = iterate_dpo_batches(examples, case["batch_size"], case["seed"], True, case["pad_id"])
    batches = islice(endless, case["count"])
    assert [
        (b.chosen_ids, b.chosen_mask, b.chosen_lengths, b.rejected_ids, b.rejected_mask, b.rejected_lengths)
        for b in batches
    ] == [
        (
            *(b["chosenIds"], b["chosenMask"], b["chosenLengths"]),
            *(b["rejectedIds"], b["rejectedMask"], b["rejectedLengths"]),
        )
        for b in case["batches"]
    ]
    once = iterate_dpo_batches(examples, case["batch_size"], case["seed"], False, case["pad_id"])
    assert len(list(once)) == case["one_epoch"]


def test_kto_batches_come_in_the_order_of_dpo() -> None:
    pairs = [DpoExample([i, 1], [i, 2], [0, 1], [0, 1]) for i in range(11)]
    rows = [KtoExample([i, 1], [0, 1], i % 3 == 0) for i in range(11)]
    dpo = islice(iterate_dpo_batches(pairs, 3, 17, True, 0), 9)
    kto = list(islice(iterate_kto_batches(rows, 3, 17, True, 0), 9))
    assert [b.ids for b in kto] == [b.chosen_ids for b in dpo]
    assert all(b.labels == [ids[0] % 3 == 0 for ids in b.ids] for b in kto)


@pytest.mark.parametrize(("count", "size"), [(0, 1), (2, 3), (2, 0)])
def test_a_batch_that_no_rows_fill_is_refused_rather_than_looped_over_for_ever(count: int, size: int) -> None:
    with pytest.raises(DataError):
        next(iterate_sft_batches([SftExample([1, 2], 0)] * count, size, 8, 0, True, 0))


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"chosen": "a", "rejected": "b"}, "preference"),
        ({"text": "a"}, "text"),
        ({"text": 3}, "unknown"),
        ({}, "unknown"),
    ],
)
def test_a_row_is_named_by_its_keys_and_types(row: dict[str, Any], name: str) -> None:
    assert probe_format(row) == name
