"""A response that repeats its prompt is trained without it; prompts that contradict each other are faulty rows."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxdist.coordinator.encode.exchange import exchange_of
from mlxdist.coordinator.encode.row_errors import RowError
from mlxdist.protocol.errors import DataError
from tests.coordinator.data.data_toys import all_shown, toy_config, toy_encoding, toy_read

SYSTEM, OTHER_SYSTEM = {"role": "system", "content": "brief"}, {"role": "system", "content": "long"}
USER, OTHER = {"role": "user", "content": "hi"}, {"role": "user", "content": "hello"}
GOOD, BAD = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}
CHAT = "<user>hi</><assistant>"
BRIEF = "<system>brief</>" + CHAT
REPEATED = "Responses repeat the prompt (2 of 2 rows, 100 %): the repetition is not trained."


def one(folder: Path, row: Any, method: str) -> tuple[str, list[str]]:
    data = toy_read(folder, [row, row], method, size=2)
    return all_shown(data)[0], list(data.notes)


@pytest.mark.parametrize(
    ("prompt", "before", "expected"),
    [
        ([USER], [USER], CHAT),
        ("hi", [USER], CHAT),
        ("hi ", [USER], CHAT),
        ("hi", [SYSTEM, USER], BRIEF),
        ([USER], [SYSTEM, USER], BRIEF),
        ([SYSTEM, USER], [USER], BRIEF),
        ([SYSTEM, USER], [SYSTEM, USER], BRIEF),
        ([OTHER, BAD, USER], [OTHER, BAD, USER], "<user>hello</><assistant>bad</>" + CHAT),
        ("hi", [OTHER, BAD, USER], "<user>hello</><assistant>bad</>" + CHAT),
    ],
)
def test_full_conversations_beside_a_prompt_are_trained_without_it(
    tmp_path: Path, prompt: Any, before: list[Any], expected: str
) -> None:
    pair, said = one(tmp_path, {"prompt": prompt, "chosen": [*before, GOOD], "rejected": [*before, BAD]}, "dpo")
    assert pair == f"{expected}[good</>] / {expected}[bad</>]"
    assert REPEATED in said
    kto, said = one(tmp_path, {"prompt": prompt, "completion": [*before, GOOD], "label": True}, "kto")
    assert (kto, REPEATED in said) == (f"{expected}[good</>]", True)
    sft, said = one(tmp_path, {"prompt": prompt, "completion": [*before, GOOD]}, "sft")
    assert (sft, REPEATED in said) == (f"{expected}[good</>]", True)


def test_one_response_may_repeat_the_prompt_and_the_other_not(tmp_path: Path) -> None:
    pair, _ = one(tmp_path, {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [BAD]}, "dpo")
    assert pair == f"{CHAT}[good</>] / {CHAT}[bad</>]"


def test_what_both_responses_begin_with_belongs_to_a_prompt_that_asks_nothing(tmp_path: Path) -> None:
    pair, said = one(tmp_path, {"prompt": [SYSTEM], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "dpo")
    assert pair == f"{BRIEF}[good</>] / {BRIEF}[bad</>]"
    assert not any("repeat" in note for note in said)
    assert one(tmp_path, {"prompt": "hi", "chosen": [SYSTEM, GOOD], "rejected": [SYSTEM, BAD]}, "dpo")[0] == pair


def test_texts_that_write_a_conversation_out_are_trained_without_the_prompt(tmp_path: Path) -> None:
    prompt = "\n\nHuman: hi\n\nAssistant:"
    pair, said = one(tmp_path, {"prompt": prompt, "chosen": prompt + " good", "rejected": prompt + " bad"}, "dpo")
    assert pair == f"{prompt}[ good</s>] / {prompt}[ bad</s>]"
    assert REPEATED in said
    answer, said = one(tmp_path, {"prompt": "Spell it", "completion": "Spell it: i, t"}, "sft")
    assert answer == "Spell it[Spell it: i, t</s>]"
    assert not any("repeat" in note for note in said)


def test_a_prompt_that_two_conversations_contradict_is_not_read_and_that_is_said(tmp_path: Path) -> None:
    pair, said = one(tmp_path, {"prompt": "an id", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "dpo")
    assert pair == f"{CHAT}[good</>] / {CHAT}[bad</>]"
    assert any("The text of prompt is not read" in note and "2 of 2 rows" in note for note in said)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "hi", "chosen": [USER, GOOD], "rejected": [OTHER, BAD]}, "rejected begins with a user turn"),
        ({"prompt": [USER], "chosen": [OTHER, GOOD], "rejected": [OTHER, BAD]}, "chosen begins with a user turn"),
        ({"chosen": [USER, GOOD], "rejected": [OTHER, BAD]}, "chosen and rejected have different prompts"),
        ({"chosen": [SYSTEM, USER, GOOD], "rejected": [OTHER_SYSTEM, USER, BAD]}, "have different prompts"),
        ({"chosen": [SYSTEM, USER, GOOD], "rejected": [USER, BAD]}, "have different prompts"),
        ({"prompt": "hi", "chosen": [SYSTEM, USER, GOOD], "rejected": [USER, BAD]}, "have different prompts"),
        ({"chosen": [USER, GOOD, USER], "rejected": [USER, BAD, OTHER]}, "the last turn of chosen is the user's"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD, OTHER]}, "the last turn of rejected is the user's"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [GOOD]}, "chosen and rejected are equal"),
        ({"prompt": "p", "chosen": "same", "rejected": "same"}, "chosen and rejected are equal"),
        ({"prompt": [USER], "chosen": "same", "rejected": "same"}, "chosen and rejected are equal"),
        ({"prompt": [USER], "chosen": [USER], "rejected": [USER, BAD]}, "chosen has no turn after the prompt"),
        ({"prompt": "", "chosen": [GOOD], "rejected": [BAD]}, "prompt is empty"),
    ],
)
def test_prompts_and_responses_that_contradict_each_other_are_faulty_rows(
    tmp_path: Path, row: Any, reason: str
) -> None:
    with pytest.raises(DataError) as caught:
        toy_read(tmp_path, [row], "dpo")
    assert "train.jsonl:1: " in str(caught.value)
    assert reason in str(caught.value)


def test_a_completion_of_another_prompt_is_a_faulty_row_for_kto_and_sft_too(tmp_path: Path) -> None:
    row = {"prompt": [USER], "completion": [OTHER, GOOD]}
    for method, extra in (("sft", {}), ("kto", {"label": True})):
        with pytest.raises(DataError, match="completion begins with a user turn that is not the prompt's"):
            toy_read(tmp_path, [{**row, **extra}], method)
    with pytest.raises(DataError, match="the last turn of completion is the user's"):
        toy_read(tmp_path, [{"prompt": [USER], "completion": [GOOD, OTHER], "label": True}], "kto")


def test_responses_that_render_alike_are_equal(tmp_path: Path) -> None:
    def trims(messages: Any, *, add_generation_prompt: bool, **options: Any) -> str:
        text = "".join(f"<{message['role']}>{message['content'].strip()}</>" for message in messages)
        return text + ("<assistant>" if add_generation_prompt else "")

    row = {"prompt": [USER], "chosen": [GOOD], "rejected": [{**GOOD, "content": "good\n"}]}
    with pytest.raises(DataError, match="chosen and rejected are equal"):
        toy_read(tmp_path, [row], "dpo", template=trims)


turns = st.builds(
    lambda system, said: [*system, *said],
    st.sampled_from([[], [SYSTEM], [OTHER_SYSTEM]]),
    st.lists(st.sampled_from([USER, OTHER, GOOD, BAD]), max_size=4),
)


def talk(messages: list[Any]) -> list[Any]:
    return [message for message in messages if message["role"] != "system"]


@settings(max_examples=300, deadline=None)
@given(turns, turns, turns)
def test_no_turn_of_a_prompt_is_ever_left_in_a_response_or_lost(prompt: Any, chosen: Any, rejected: Any) -> None:
    """A pair is refused, or its prompt and each response are the conversation of the row, the prompt in front once."""
    encoding = toy_encoding(toy_config("rows", "dpo"))
    fields = {"prompt": [*prompt, USER], "chosen": [*chosen, GOOD], "rejected": [*rejected, BAD]}
    try:
        found = exchange_of(fields, ("chosen", "rejected"), encoding)
    except RowError:
        return
    assert isinstance(found.prompt, list)
    for name, rest in zip(("chosen", "rejected"), found.responses, strict=True):
        written, whole = talk(fields[name]), talk([*found.prompt, *rest])
        assert rest[0]["role"] == "assistant"
        assert fields[name][-len(rest) :] == rest
        begins = written[: len(talk(fields["prompt"]))] == talk(fields["prompt"])
        if begins or fields[name][0]["role"] != "assistant":
            assert whole == written or whole == [*talk(fields["prompt"]), *written]
        else:
            assert whole == [*talk(fields["prompt"]), *written]
