"""Chat templates: what a template refuses is said in its own words, and a system turn finds a place."""

from pathlib import Path
from typing import Any

import pytest

from mlxdist.protocol.errors import DataError
from tests.coordinator.data.data_toys import all_shown, toy_read, toy_template

SYSTEM = {"role": "system", "content": "be brief"}
USER, YO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


def no_system(messages: list[dict[str, Any]], **options: Any) -> str:
    if any(message["role"] == "system" for message in messages):
        raise ValueError("System role not supported\nat line 3")
    return toy_template(messages, **options)


def test_a_refused_system_turn_goes_into_the_first_user_turn_and_that_is_said_once(tmp_path: Path) -> None:
    data = toy_read(tmp_path, [{"messages": [SYSTEM, USER, YO]}] * 3, template=no_system)
    assert all_shown(data) == ["<user>be brief\n\nhi</><assistant>[yo</>]"] * 3
    assert [note for note in data.notes if "system turn" in note] == [
        "The chat template takes no system turn: system texts stand at the start of the first user turn."
    ]


def test_a_template_that_takes_a_system_turn_keeps_it(tmp_path: Path) -> None:
    data = toy_read(tmp_path, [{"messages": [SYSTEM, USER, YO]}])
    assert all_shown(data) == ["<system>be brief</><user>hi</><assistant>[yo</>]"]
    assert not any("system turn" in note for note in data.notes)


def test_a_system_turn_without_a_user_turn_is_not_lost_in_silence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no user turn to put it into"):
        toy_read(tmp_path, [{"messages": [SYSTEM, YO]}], template=no_system)


def test_rows_of_texts_need_no_template_and_rows_of_messages_name_the_key_that_gives_one(tmp_path: Path) -> None:
    assert all_shown(toy_read(tmp_path, [{"prompt": "p", "completion": "c"}], template=None)) == ["p[c</s>]"]
    with pytest.raises(DataError, match=r"has no chat template.*set data\.chat_template"):
        toy_read(tmp_path, [{"messages": [USER, YO]}], template=None)


def test_what_a_template_refuses_is_a_faulty_row_with_the_templates_words(tmp_path: Path) -> None:
    def alternates(messages: list[dict[str, Any]], **options: Any) -> str:
        if [message["role"] for message in messages[:2]] == ["user", "user"]:
            raise ValueError("roles must alternate")
        return toy_template(messages, **options)

    with pytest.raises(DataError, match=r"train\.jsonl:2: the chat template refuses .* roles must alternate"):
        toy_read(tmp_path, [{"messages": [USER, YO]}, {"messages": [USER, USER, YO]}], template=alternates)


def test_plain_prompts_beside_a_chat_template_are_pointed_out(tmp_path: Path) -> None:
    plain = toy_read(tmp_path, [{"prompt": "p", "completion": "c"}])
    assert any("plain texts" in note for note in plain.notes)
    assert not any("plain texts" in note for note in toy_read(tmp_path, [{"messages": [USER, YO]}]).notes)
