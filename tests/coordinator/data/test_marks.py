"""Marks per turn: weight 0 and 1, train true and false. They are honored, and anything else is a faulty row."""

from pathlib import Path
from typing import Any

import pytest

from mlxdist.protocol.errors import DataError
from tests.coordinator.data.data_toys import all_shown, toy_read

USER, OTHER = {"role": "user", "content": "hi"}, {"role": "user", "content": "more"}
YO, DONE = {"role": "assistant", "content": "yo"}, {"role": "assistant", "content": "done"}


def one(folder: Path, messages: list[Any], **options: Any) -> str:
    return all_shown(toy_read(folder, [{"messages": messages}], **options))[0]


@pytest.mark.parametrize("off", [{"weight": 0}, {"train": False}, {"weight": 0.0}, {"weight": 0, "train": False}])
@pytest.mark.parametrize("on", [{}, {"weight": 1}, {"train": True}, {"weight": None}])
def test_a_masked_turn_is_read_and_not_trained(tmp_path: Path, off: Any, on: Any) -> None:
    messages = [USER, {**YO, **off}, OTHER, {**DONE, **on}]
    expected = "<user>hi</><assistant>yo</><user>more</><assistant>[done</>]"
    assert one(tmp_path, messages, train_on="all") == one(tmp_path, messages) == expected


def test_last_is_the_last_turn_that_is_not_masked(tmp_path: Path) -> None:
    messages = [USER, YO, OTHER, {**DONE, "weight": 0}]
    assert one(tmp_path, messages) == "<user>hi</><assistant>[yo</>]<user>more</><assistant>done</>"


def test_a_turn_that_is_marked_to_be_trained_is_trained_whatever_train_on_says(tmp_path: Path) -> None:
    messages = [USER, {**YO, "train": True}, OTHER, DONE]
    assert one(tmp_path, messages) == "<user>hi</><assistant>[yo</>]<user>more</><assistant>[done</>]"


def test_everything_leaves_out_the_masked_turns(tmp_path: Path) -> None:
    messages = [USER, {**YO, "weight": 0}, OTHER, DONE]
    expected = "<[user>hi</><assistant>]yo</>[<user>more</><assistant>done</>]"
    assert one(tmp_path, messages, train_on="everything") == expected


def test_the_turns_of_sharegpt_have_marks_too(tmp_path: Path) -> None:
    messages = [
        {"from": "human", "value": "hi"},
        {"from": "gpt", "value": "yo", "weight": 0},
        {"from": "human", "value": "more"},
        {"from": "gpt", "value": "done", "train": True},
    ]
    expected = "<user>hi</><assistant>yo</><user>more</><assistant>[done</>]"
    assert one(tmp_path, messages, train_on="all") == expected


def test_marks_of_a_completion_are_honored_and_those_of_a_prompt_change_nothing(tmp_path: Path) -> None:
    row = {"prompt": [USER, {**YO, "weight": 0}, OTHER], "completion": [{**YO, "train": False}, OTHER, DONE]}
    shown = all_shown(toy_read(tmp_path, [row]))[0]
    assert shown.endswith("<user>more</><assistant>yo</><user>more</><assistant>[done</>]")
    repeated = {"prompt": [USER], "completion": [USER, {**YO, "weight": 0}, OTHER, DONE]}
    assert all_shown(toy_read(tmp_path, [repeated]))[0].endswith("yo</><user>more</><assistant>[done</>]")


@pytest.mark.parametrize(
    ("mark", "reason"),
    [
        ({"weight": 0.5}, "messages[1].weight is a number (0.5), and must be 0 or 1"),
        ({"weight": 2}, "messages[1].weight is a number (2), and must be 0 or 1"),
        ({"weight": "0"}, "messages[1].weight is text, and must be 0 or 1"),
        ({"weight": True}, "messages[1].weight is true, and must be 0 or 1"),
        ({"train": 0}, "messages[1].train is a number (0), and must be true or false"),
        ({"train": "no"}, "messages[1].train is text, and must be true or false"),
        ({"weight": 0, "train": True}, "messages[1] has weight 0 and train true, which contradict each other"),
    ],
)
@pytest.mark.parametrize("train_on", ["last", "all", "everything"])
def test_any_other_mark_is_a_faulty_row_with_its_path(tmp_path: Path, mark: Any, reason: str, train_on: str) -> None:
    with pytest.raises(DataError) as caught:
        one(tmp_path, [USER, {**YO, **mark}, OTHER, DONE], train_on=train_on)
    assert f"train.jsonl:1: {reason}" in str(caught.value)


@pytest.mark.parametrize("train_on", ["last", "all", "everything"])
def test_a_row_with_all_turns_masked_is_faulty(tmp_path: Path, train_on: str) -> None:
    with pytest.raises(DataError, match="every assistant turn is marked not to be trained"):
        one(tmp_path, [USER, {**YO, "weight": 0}, OTHER, {**DONE, "train": False}], train_on=train_on)


def test_a_mark_that_asks_to_train_a_users_turn_is_said_to_have_no_effect(tmp_path: Path) -> None:
    said = toy_read(tmp_path, [{"messages": [{**USER, "train": True}, YO]}]).notes
    assert any("have no effect (1 of 1 rows, 100 %)" in note for note in said)


@pytest.mark.parametrize(("method", "extra"), [("dpo", {"rejected": [YO]}), ("kto", {"label": True})])
def test_a_masked_turn_in_a_response_of_preferences_is_a_faulty_row(tmp_path: Path, method: str, extra: Any) -> None:
    name = "chosen" if method == "dpo" else "completion"
    row = {"prompt": [USER], name: [{**DONE, "weight": 0}], **extra}
    with pytest.raises(DataError, match=rf"{name}\[0\] is marked not to be trained"):
        toy_read(tmp_path, [row], method)
