"""data.plain_text: prompts and responses of text as turns of the chat template, or joined as they stand."""

from pathlib import Path
from typing import Any

import pytest

from mlxdist.protocol.errors import DataError
from tests.coordinator.data.data_toys import all_shown, toy_read
from tests.coordinator.data.test_chat_template import no_system

SFT = {"prompt": "hi", "completion": "yo"}
DPO = {"prompt": "hi", "chosen": "yo", "rejected": "no"}
KTO = {**SFT, "label": True}
CHAT = "<user>hi</><assistant>"


def read(folder: Path, row: Any, method: str = "sft", way: str = "auto", **options: Any) -> tuple[str, str]:
    data = toy_read(folder, [row, row], method, plain_text=way, size=2, **options)
    return all_shown(data)[0], "\n".join(note for note in data.notes if "plain texts" in note)


@pytest.mark.parametrize(
    ("method", "row", "chat", "raw"),
    [
        ("sft", SFT, f"{CHAT}[yo</>]", "hi[yo</s>]"),
        ("dpo", DPO, f"{CHAT}[yo</>] / {CHAT}[no</>]", "hi[yo</s>] / hi[no</s>]"),
        ("kto", KTO, f"{CHAT}[yo</>]", "hi[yo</s>]"),
    ],
)
def test_texts_become_turns_where_there_is_a_chat_template(
    tmp_path: Path, method: str, row: Any, chat: str, raw: str
) -> None:
    assert read(tmp_path, row, method)[0] == read(tmp_path, row, method, "chat")[0] == chat
    assert read(tmp_path, row, method, "raw")[0] == raw
    assert read(tmp_path, row, method, "auto", template=None)[0] == raw


@pytest.mark.parametrize(("method", "row"), [("sft", SFT), ("dpo", DPO), ("kto", KTO)])
def test_a_text_and_its_messages_are_the_same_row(tmp_path: Path, method: str, row: Any) -> None:
    messages = {
        key: [{"role": "user" if key == "prompt" else "assistant", "content": value}]
        for key, value in row.items()
        if key != "label"
    }
    assert read(tmp_path, row, method)[0] == read(tmp_path, {**row, **messages}, method)[0]


@pytest.mark.parametrize(("method", "row"), [("sft", SFT), ("dpo", DPO), ("kto", KTO)])
def test_a_system_column_is_the_system_turn(tmp_path: Path, method: str, row: Any) -> None:
    assert read(tmp_path, {**row, "system": "be brief"}, method)[0].startswith(f"<system>be brief</>{CHAT}[")
    assert read(tmp_path, {**row, "system": " "}, method)[0].startswith(f"{CHAT}[")
    assert read(tmp_path, {**row, "system": None}, method)[0].startswith(f"{CHAT}[")
    folded, _ = read(tmp_path, {**row, "system": "be brief"}, method, template=no_system)
    assert folded.startswith("<user>be brief\n\nhi</><assistant>[")
    mapped, _ = read(tmp_path, {**row, "role": "be brief"}, method, columns={"system": "role"})
    assert mapped.startswith(f"<system>be brief</>{CHAT}[")


@pytest.mark.parametrize("before", [[], [{"role": "user", "content": "hi"}]], ids=["answers", "conversations"])
def test_a_system_column_stands_beside_a_text_prompt_of_conversations_too(tmp_path: Path, before: Any) -> None:
    answers = {name: [*before, {"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    shown, _ = read(tmp_path, {"prompt": "hi", **answers, "system": "be brief"}, "dpo")
    assert shown == " / ".join(f"<system>be brief</>{CHAT}[{name}</>]" for name in answers)


def test_texts_without_a_prompt_and_rows_of_text_stay_as_they_are(tmp_path: Path) -> None:
    assert read(tmp_path, {"text": "hi yo"})[0] == "h[i yo</s>]"
    assert read(tmp_path, {"chosen": "hi yo", "rejected": "hi no"}, "dpo")[0] == "hi [yo</s>] / hi [no</s>]"
    assert read(tmp_path, {**DPO, "prompt": [{"role": "user", "content": "hi"}]}, "dpo")[0].startswith(
        f"{CHAT}[yo</s>]"
    )


def test_an_empty_prompt_is_an_empty_turn_of_the_user(tmp_path: Path) -> None:
    assert read(tmp_path, {**SFT, "prompt": ""})[0] == "<user></><assistant>[yo</>]"


def test_one_sentence_says_which_way_and_why(tmp_path: Path) -> None:
    assert "become user and assistant turns of the chat template, as chat programs" in read(tmp_path, SFT)[1]
    assert 'data.plain_text = "chat"' in read(tmp_path, SFT, way="chat")[1]
    assert "the model's chat template is not used" in read(tmp_path, SFT, way="raw")[1]
    assert "this tokenizer has no template" in read(tmp_path, SFT, template=None)[1]
    assert read(tmp_path, {"text": "hi"})[1] == ""


def test_chat_without_a_chat_template_is_refused_with_the_key_that_gives_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no chat template.*set data\.chat_template"):
        read(tmp_path, SFT, way="chat", template=None)


def test_everything_trains_the_whole_conversation_of_a_wrapped_text(tmp_path: Path) -> None:
    assert read(tmp_path, SFT, train_on="everything")[0] == "<[user>hi</><assistant>yo</>]"
