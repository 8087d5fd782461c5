"""Rows of DPO and KTO: prompt and response joined, the response kept whole where it can be (targets in brackets)."""

from pathlib import Path
from typing import Any

import pytest

from mlxdist.coordinator.batch.batch_order import Step
from mlxdist.coordinator.batch.micro_batches import kl_rows
from mlxdist.protocol.errors import DataError
from tests.coordinator.data.data_toys import ToyTokenizer, all_shown, shown, thinking_template, toy_read

USER = {"role": "user", "content": "hi"}
GOOD, BAD = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}
CHAT = "<user>hi</><assistant>"


def one(folder: Path, row: Any, method: str = "dpo", **options: Any) -> str:
    return all_shown(toy_read(folder, [row, row], method, size=2, **options))[0]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "p", "chosen": "yes", "rejected": "no"}, "p[yes</s>] / p[no</s>]"),
        ({"prompt": [USER], "chosen": "yes", "rejected": "no"}, f"{CHAT}[yes</s>] / {CHAT}[no</s>]"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, None),
        ({"prompt": "hi", "chosen": [GOOD], "rejected": [BAD]}, None),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, None),
        ({"prompt": "whatever", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, None),
        ({"chosen": "same yes", "rejected": "same no"}, "same [yes</s>] / same [no</s>]"),
        ({"prompt": "xa", "chosen": "bc", "rejected": "d"}, "xa[bc</s>] / xa[d</s>]"),
        ({"prompt": "p", "chosen": "yes</s>", "rejected": "no"}, "p[yes</s>] / p[no</s>]"),
    ],
    ids=[
        *("texts", "chat prompt", "all chat", "text prompt, chat", "implicit chat", "implicit beside a prompt column"),
        *("implicit text", "merging seam", "own eos"),
    ],
)
def test_every_shape_of_a_pair_has_its_texts_and_targets(tmp_path: Path, row: Any, expected: str | None) -> None:
    assert one(tmp_path, row) == (expected or f"{CHAT}[good</>] / {CHAT}[bad</>]")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "p", "chosen": "", "rejected": "no"}, "chosen is empty"),
        ({"prompt": "p", "chosen": "yes", "rejected": 4}, "rejected is a number (4), not text or a list of messages"),
        (
            {"prompt": 1.5, "chosen": "yes", "rejected": "no"},
            "prompt is a number (1.5), not text or a list of messages",
        ),
        (
            {"prompt": [USER], "chosen": [GOOD], "rejected": [{**BAD, "content": ""}]},
            "the last turn of rejected is empty",
        ),
        ({"chosen": "same", "rejected": "same"}, "no prompt can be told from them"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "chosen and rejected do not part in any message"),
    ],
)
def test_a_pair_that_cannot_be_trained_on_is_named_with_its_reason(tmp_path: Path, row: Any, reason: str) -> None:
    with pytest.raises(DataError) as caught:
        toy_read(tmp_path, [row], "dpo")
    assert "train.jsonl:1: " in str(caught.value)
    assert reason in str(caught.value)


def test_a_long_pair_is_cut_on_the_left_so_that_the_response_and_its_eos_stay(tmp_path: Path) -> None:
    row = {"prompt": "0123456789", "chosen": "yes", "rejected": "a long response"}
    cut: dict[str, Any] = {"max_length": 8, "max_cut": 1.0}
    assert one(tmp_path, row, **cut) == "6789[yes</s>] / e[sponse</s>]"
    assert one(tmp_path, row, **cut, tokenizer=ToyTokenizer(bos_id=1)) == "<s>789[yes</s>] / <s>[sponse</s>]"


def test_prompt_and_completion_have_limits_of_their_own(tmp_path: Path) -> None:
    row = {"prompt": "0123456789", "chosen": "yes", "rejected": "a long response"}
    assert one(tmp_path, row, max_prompt_length=2, max_completion_length=5) == "89[yes</s>] / 89[a lo</s>]"


def test_thinking_is_off_for_prompts_unless_the_run_says_otherwise(tmp_path: Path) -> None:
    row = {"prompt": [USER], "chosen": "yes", "rejected": "no"}
    assert one(tmp_path, row, template=thinking_template).startswith(f"{CHAT}<think></think>[yes")
    on: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    assert one(tmp_path, row, template=thinking_template, **on).startswith(f"{CHAT}[yes")
    both = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    assert one(tmp_path, both, template=thinking_template).startswith(f"{CHAT}<think></think>[good</>]")


@pytest.mark.parametrize(
    ("label", "desirable"),
    [
        *((value, True) for value in (True, 1, 1.0, "true", "True", " YES ", "1", "y", "T", "good", "desirable")),
        *((value, False) for value in (False, 0, 0.0, "false", "0", "No", "FALSE", "n", "f", "bad", "undesirable")),
    ],
)
def test_a_label_is_read_by_its_word_never_by_its_truth(tmp_path: Path, label: Any, desirable: bool) -> None:
    data = toy_read(tmp_path, [{"prompt": "p", "completion": "c", "label": label}] * 2, "kto", size=2)
    assert data.train.labels is not None
    assert data.train.labels.tolist() == [desirable] * 2


@pytest.mark.parametrize("label", ["maybe", "", 2, -1, 0.5, float("nan"), [True]])
def test_any_other_label_is_an_error(tmp_path: Path, label: Any) -> None:
    with pytest.raises(DataError, match=r"train\.jsonl:1: label is .*, and must be true or false"):
        toy_read(tmp_path, [{"prompt": "p", "completion": "c", "label": label}], "kto")


def test_a_kto_row_keeps_the_eos_of_a_capped_completion_and_trims_the_prompt_on_the_left(tmp_path: Path) -> None:
    row = {"prompt": "0123456789", "completion": "answer", "label": True}
    cut: dict[str, Any] = {"max_cut": 1.0}
    assert one(tmp_path, row, "kto", max_length=10, **cut) == "789[answer</s>]"
    assert one(tmp_path, row, "kto", max_length=5, **cut) == "a[nsw</s>]"
    assert one(tmp_path, row, "kto", max_completion_length=3) == "0123456789[an</s>]"
    assert one(tmp_path, row, "kto", max_length=5, **cut, tokenizer=ToyTokenizer(bos_id=1)) == "<s>[ans</s>]"


def test_kto_takes_conversations_too(tmp_path: Path) -> None:
    assert one(tmp_path, {"prompt": [USER], "completion": [GOOD], "label": 1}, "kto") == f"{CHAT}[good</>]"


def test_unpair_makes_a_desirable_and_an_undesirable_row_of_each_pair(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "chosen": "yes", "rejected": "no"}, {"prompt": "q", "chosen": "ja", "rejected": "nein"}]
    data = toy_read(tmp_path, rows, "kto", unpair=True, size=2)
    assert all_shown(data) == ["p[yes</s>]", "p[no</s>]", "q[ja</s>]", "q[nein</s>]"]
    assert data.train.labels is not None
    assert data.train.labels.tolist() == [1, 0, 1, 0]
    assert [data.train.where(index) for index in range(4)] == ["train.jsonl:1"] * 2 + ["train.jsonl:2"] * 2
    assert [data.train.rows(index)[0].row_id for index in range(4)] == [0, 1, 2, 3]


def kto_rows(*texts: str) -> list[dict[str, Any]]:
    pairs = (text.split("|") for text in texts)
    return [{"prompt": prompt, "completion": completion, "label": True} for prompt, completion in pairs]


def test_a_kl_pair_takes_the_completion_of_the_row_before_it_over_the_whole_step(tmp_path: Path) -> None:
    data = toy_read(tmp_path, kto_rows("A|1", "B|2", "C|3", "D|4", "E|5"), "kto", size=2)
    pairs = kl_rows(data.train, Step(1, ((4, 0), (2, 3))))
    assert [shown(row) for row in pairs] == ["E[4</s>]", "A[5</s>]", "C[1</s>]", "D[3</s>]"]
    assert [row.row_id for row in pairs] == [4, 0, 2, 3]


def test_the_prompt_of_a_kl_pair_is_trimmed_again_from_the_whole_prompt(tmp_path: Path) -> None:
    rows = kto_rows("0123456789|long one", "abcdefghij|x")
    data = toy_read(
        tmp_path, rows, "kto", size=2, max_length=10, max_cut=1.0, tokenizer=ToyTokenizer(pieces={"</s>": 2})
    )
    step = Step(1, ((0, 1),))
    assert all_shown(data) == ["9[long one</s>]", "cdefghij[x</s>]"]
    assert [shown(row) for row in kl_rows(data.train, step)] == ["23456789[x</s>]", "j[long one</s>]"]
