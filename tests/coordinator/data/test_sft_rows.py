"""Rows of SFT as a run trains on them: which tokens there are, and which of them are targets (in brackets)."""

from pathlib import Path
from typing import Any

import pytest

from mlxdist.protocol.errors import DataError
from tests.coordinator.data.data_toys import EOS, ToyTokenizer, all_shown, thinking_template, toy_read

USER, OTHER = {"role": "user", "content": "hi"}, {"role": "user", "content": "more"}
YO, DONE = {"role": "assistant", "content": "yo"}, {"role": "assistant", "content": "done"}
FOUR = [USER, YO, OTHER, DONE]


def one(folder: Path, row: Any, **options: Any) -> str:
    return all_shown(toy_read(folder, [row], **options))[0]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [USER, YO]}, "<user>hi</><assistant>[yo</>]"),
        ({"prompt": "Q: ", "completion": "A"}, "Q: [A</s>]"),
        ({"text": "words"}, "w[ords</s>]"),
        ({"prompt": [USER], "completion": [YO]}, "<user>hi</><assistant>[yo</>]"),
        ({"prompt": [USER], "completion": "yo"}, "<user>hi</><assistant>[yo</>]"),
        ({"prompt": "hi", "completion": [YO]}, "<user>hi</><assistant>[yo</>]"),
        ({"prompt": "", "completion": "abc"}, "ab[c</s>]"),
        ({"messages": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}, None),
        ({"messages": [{**USER, "content": [{"type": "text", "text": "h"}, {"text": "i"}]}, YO]}, None),
        ({"messages": [{**USER, "name": None}, YO], "tools": None, "text": None}, None),
    ],
)
def test_every_shape_has_its_text_and_its_targets(tmp_path: Path, row: Any, expected: str | None) -> None:
    assert one(tmp_path, row) == (expected or "<user>hi</><assistant>[yo</>]")


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        ("last", "<user>hi</><assistant>yo</><user>more</><assistant>[done</>]"),
        ("all", "<user>hi</><assistant>[yo</>]<user>more</><assistant>[done</>]"),
        ("everything", "<[user>hi</><assistant>yo</><user>more</><assistant>done</>]"),
    ],
)
def test_train_on_chooses_the_turns(tmp_path: Path, train_on: str, expected: str) -> None:
    assert one(tmp_path, {"messages": FOUR}, train_on=train_on) == expected


@pytest.mark.parametrize(
    ("messages", "train_on", "expected"),
    [
        ([YO, USER, DONE], "last", "<assistant>yo</><user>hi</><assistant>[done</>]"),
        ([YO, USER, DONE], "all", "<[assistant>yo</>]<user>hi</><assistant>[done</>]"),
        ([YO], "last", "<[assistant>yo</>]"),
        ([USER, YO, OTHER], "last", "<user>hi</><assistant>[yo</>]<user>more</>"),
        ([USER], "everything", "<[user>hi</>]"),
    ],
    ids=["assistant first", "assistant first, all", "assistant alone", "user last", "no assistant"],
)
def test_conversations_of_other_forms(tmp_path: Path, messages: Any, train_on: str, expected: str) -> None:
    assert one(tmp_path, {"messages": messages}, train_on=train_on) == expected


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [USER]}, "no assistant turn to train on"),
        ({"messages": [USER, {**YO, "content": " \n"}]}, "the assistant turn at message 2 is empty"),
        ({"prompt": "p", "completion": ""}, "completion is empty"),
        ({"text": ""}, "text is empty"),
        ({"prompt": "p", "completion": float("nan")}, "completion is a number (nan), not text or a list of messages"),
        ({"prompt": 5, "completion": "c"}, "prompt is a number (5), not text or a list of messages"),
        ({"messages": [USER, {**YO, "content": 3.5}]}, "messages[1].content is a number (3.5), not text"),
        ({"messages": [USER, {"role": "assistant"}]}, "messages[1].content is missing"),
        ({"messages": [USER, {"content": "yo"}]}, "messages[1] has no role"),
        ({"messages": "hi"}, "messages is text, not a list of messages"),
        ({"messages": []}, "messages is an empty list"),
        ({"messages": [USER, "yo"]}, "messages[1] is text, not a message with role and content"),
        ({"messages": [{**USER, "content": [{"type": "image_url"}]}, YO]}, "messages[0].content[0] is image_url"),
        ({"prompt": "p", "completion": "\ud83d"}, "completion has half a character (\\ud83d) at place 1"),
        ({"messages": [USER, YO], "tools": 5}, "tools is a number (5), not a list"),
    ],
)
def test_a_row_that_cannot_be_trained_on_is_named_with_its_reason(tmp_path: Path, row: Any, reason: str) -> None:
    with pytest.raises(DataError) as caught:
        toy_read(tmp_path, [{"messages": [USER, YO]} if "messages" in row else dict.fromkeys(row, "filled"), row])
    assert f"train.jsonl:2: {reason}" in str(caught.value)


def test_a_prompt_longer_than_max_length_is_refused_with_the_lengths_that_fit(tmp_path: Path) -> None:
    rows = [{"prompt": "p" * 20, "completion": "c"}, {"prompt": "p", "completion": "c"}]
    with pytest.raises(DataError) as caught:
        toy_read(tmp_path, rows, max_length=20)
    assert "train.jsonl:1: its first trained token is number 21 of 22, beyond batch.max_length = 20" in str(
        caught.value
    )
    assert "batch.max_length = 22 fits 90 % of the rows, 22 fits 99 %, 22 fits all" in str(caught.value)


def test_a_prompt_that_leaves_one_target_is_trained(tmp_path: Path) -> None:
    assert one(tmp_path, {"prompt": "ppp", "completion": "ccc"}, max_length=4, max_cut=1.0) == "ppp[c]"


def test_a_long_row_is_cut_on_the_right_and_its_untruncated_length_kept(tmp_path: Path) -> None:
    data = toy_read(tmp_path, [{"prompt": "p", "completion": "c" * 100_000}], max_length=64, max_cut=1.0)
    (row,) = data.train.rows(0)
    assert (len(row.ids), int(row.targets.sum())) == (64, 63)
    assert data.train.lengths.tolist() == [100_002]


def test_the_boundary_of_a_token_that_merges_across_the_seam_is_before_it(tmp_path: Path) -> None:
    assert one(tmp_path, {"prompt": "xa", "completion": "bc"}) == "x[abc</s>]"


def test_eos_is_appended_once_and_only_where_the_run_wants_it(tmp_path: Path) -> None:
    row = {"prompt": "p", "completion": "c"}
    assert one(tmp_path, {**row, "completion": "c</s>"}) == "p[c</s>]"
    assert one(tmp_path, row, append_eos=False) == "p[c]"
    assert one(tmp_path, row, tokenizer=ToyTokenizer(eos_id=None)) == "p[c]"


def test_a_chat_render_that_does_not_end_itself_gets_the_eos(tmp_path: Path) -> None:
    def open_ended(messages: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        ended = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
        return ended + ("\nassistant: " if add_generation_prompt else "")

    assert one(tmp_path, {"messages": [USER, YO]}, template=open_ended) == "user: hi\nassistant: [yo</s>]"


def test_one_bos_stands_in_front_never_two(tmp_path: Path) -> None:
    bos = ToyTokenizer(bos_id=1)
    assert one(tmp_path, {"prompt": "p", "completion": "c"}, tokenizer=bos) == "<s>p[c</s>]"
    assert one(tmp_path, {"text": "<s>tx"}, tokenizer=bos) == "<s>[tx</s>]"
    assert one(tmp_path, {"text": "<s><s>tx"}, tokenizer=bos) == "<s>[tx</s>]"

    def with_bos(messages: Any, **options: Any) -> str:
        return f"<s>{messages[0]['content']}:" + "".join(message["content"] for message in messages[1:])

    assert one(tmp_path, {"messages": [USER, YO]}, template=with_bos, tokenizer=bos) == "<s>hi:[yo</s>]"


def test_everything_trains_the_prompt_of_a_completion_too(tmp_path: Path) -> None:
    assert one(tmp_path, {"prompt": "p", "completion": "c"}, train_on="everything") == "p[c</s>]"
    assert one(tmp_path, {"prompt": "pq", "completion": "c"}, train_on="everything") == "p[qc</s>]"


def test_tools_and_template_arguments_of_run_and_row_reach_the_template(tmp_path: Path) -> None:
    row = {"messages": [USER, YO], "tools": [{"name": "t"}], "chat_template_kwargs": {"x": 2}}
    seen = one(tmp_path, row, chat_template_kwargs={"x": 1, "y": 3})
    assert seen.startswith("{'x': 2, 'y': 3, 'tools': [{'name': 't'}]}<user>")


def test_two_identical_rows_are_two_rows(tmp_path: Path) -> None:
    data = toy_read(tmp_path, [{"text": "same"}] * 2, size=2)
    assert [data.train.rows(index)[0].row_id for index in (0, 1)] == [0, 1]
    assert all_shown(data) == ["s[ame</s>]"] * 2


def test_thinking_is_the_prompts_or_the_answers_as_the_template_has_it(tmp_path: Path) -> None:
    row = {"messages": [USER, YO, OTHER, {"role": "assistant", "content": "<think>hm</think>done"}]}
    options = {"template": thinking_template, "train_on": "all"}
    assert (
        one(tmp_path, row, **options)
        == "<user>hi</><assistant>[yo</>]<user>more</><assistant>[<think>hm</think>done</>]"
    )
    plain = {"messages": [USER, YO]}
    assert one(tmp_path, plain, **options) == "<user>hi</><assistant>[<think></think>yo</>]"
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert one(tmp_path, {**plain, **off}, **options) == "<user>hi</><assistant><think></think>[yo</>]"
    assert one(tmp_path, plain, **options, **off) == "<user>hi</><assistant><think></think>[yo</>]"


def test_ids_are_int32_targets_uint8_and_the_eos_a_target(tmp_path: Path) -> None:
    (row,) = toy_read(tmp_path, [{"prompt": "p", "completion": "c"}]).train.rows(0)
    assert (row.ids.dtype, row.targets.dtype) == ("int32", "uint8")
    assert row.ids[-1] == EOS
    assert row.targets.tolist() == [0, 1, 1]
