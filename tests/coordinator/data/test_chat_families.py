"""The trained tokens of conversations are the assistant's turns, for every family of templates and kind of turns."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxdist.coordinator.batch.row_store import unpack
from mlxdist.coordinator.encode.remarks import Tally
from mlxdist.coordinator.encode.sft import draft_sft
from tests.coordinator.data.chat_templates import FAMILIES, SpecialTokenizer, jinja
from tests.coordinator.data.data_toys import toy_config, toy_encoding

TOKENIZER = SpecialTokenizer(ends=("</s>", "<|user|>", "<|observation|>"))
TEMPLATES = {name: jinja(family.source) for name, family in FAMILIES.items()}
USER, MORE = {"role": "user", "content": "Weather?"}, {"role": "user", "content": "And you?"}
DONE = {"role": "assistant", "content": "12 degrees."}
THOUGHT = {**DONE, "reasoning_content": "cold, I think"}


def call(*names: str, arguments: Any = None, **fields: Any) -> dict[str, Any]:
    given = {"of": "x"} if arguments is None else arguments
    calls = [{"id": "c", "type": "function", "function": {"name": name, "arguments": given}} for name in names]
    return {"role": "assistant", "content": "", "tool_calls": calls, **fields}


RESULT = {"role": "tool", "content": "12 C", "tool_call_id": "c"}


def read(name: str, row: Any, template: Any = None, **values: Any) -> tuple[list[str], str, list[str]]:
    """The trained pieces of a row, its whole text, and what is said of it."""
    encoding = toy_encoding(toy_config("rows", **values), TOKENIZER, template or TEMPLATES[name])
    draft = draft_sft("messages", row, encoding)
    (made,) = draft.finish(TOKENIZER.encode_batch(draft.texts))
    ids, targets = (array.tolist() for array in (lambda row: (row.ids, row.targets))(unpack(0, made.parts[0])))
    pieces, inside = [], False
    for token, target in zip(ids, targets, strict=True):
        if target and not inside:
            pieces.append("")
        if target:
            pieces[-1] += TOKENIZER.decode([token])
        inside = bool(target)
    tally = Tally()
    tally.add(draft.remarks)
    return pieces, TOKENIZER.decode(ids), tally.sentences(1)


def expected(name: str, whole: str, count: int) -> list[str]:
    """The last `count` turns of a render, turns that touch each other as one piece."""
    turns = FAMILIES[name].turns(whole)
    pieces: list[str] = []
    place = 0
    for index, text in enumerate(turns):
        at = whole.index(text, place)
        if index >= len(turns) - count:
            if pieces and at == place:
                pieces[-1] += text
            else:
                pieces.append(text)
        place = at + len(text)
    return pieces


CONVERSATIONS = {
    "a call": [USER, call("get_weather"), RESULT, DONE],
    "a call without content": [USER, {k: v for k, v in call("f").items() if k != "content"}, RESULT, DONE],
    "two calls and words": [USER, call("f", "g", content="Let me see."), RESULT, RESULT, DONE],
    "a call with reasoning": [USER, call("f", reasoning_content="hm, hm"), RESULT, THOUGHT],
    "a call with words": [USER, call("f", content="I look."), RESULT, call("g", content="Again."), RESULT, DONE],
    "a call with a number": [USER, call("f", arguments={"of": 1}, reasoning_content="hm"), RESULT, DONE, MORE, DONE],
    "a call of nothing": [USER, call("f", arguments={}, reasoning_content="hm"), RESULT, DONE, MORE, DONE],
    "a result at the end": [USER, DONE, MORE, call("f"), RESULT],
    "calls of several rounds": [USER, call("f"), RESULT, call("g"), RESULT, DONE, MORE, call("f"), RESULT, DONE],
    "reasoning in an earlier turn": [USER, THOUGHT, MORE, DONE],
    "reasoning in every turn": [USER, THOUGHT, MORE, THOUGHT],
    "reasoning in the content": [USER, {**DONE, "content": "<think>so</think>12."}, MORE, DONE],
    "the same words everywhere": [{**USER, "content": "12"}, {**DONE, "content": "12"}] * 3,
    "a user at the end": [USER, DONE, MORE],
    "a call and then a user": [USER, call("f"), RESULT, MORE, DONE],
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_all_trains_every_turn_of_the_assistant_with_its_end_token(name: str, kind: str) -> None:
    messages = CONVERSATIONS[kind]
    count = sum(message["role"] == "assistant" for message in messages)
    pieces, whole, _ = read(name, {"messages": messages}, train_on="all")
    assert pieces == expected(name, whole, count)
    assert len(FAMILIES[name].turns(whole)) == count


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_last_trains_the_last_turn_of_the_assistant_also_before_a_tools_result(name: str, kind: str) -> None:
    pieces, whole, _ = read(name, {"messages": CONVERSATIONS[kind]})
    assert pieces == expected(name, whole, 1)


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"mistral", "drops system"}))  # these write no header
def test_a_turn_that_opens_the_conversation_is_trained_without_a_system_of_the_templates_own(name: str) -> None:
    front = "<|im_start|>system\nYou are kind.<|im_end|>\n"
    source = "{% if messages[0].role != 'system' %}" + front + "{% endif %}" + FAMILIES[name].source
    for messages in ([{**DONE, "content": "Hello."}, MORE, DONE], [{**DONE, "content": "Hello."}]):
        pieces, whole, _ = read(name, {"messages": messages}, jinja(source), train_on="all")
        assert whole.startswith(front.strip())
        assert pieces == expected(name, whole, len(messages[::2]))


@pytest.mark.parametrize("name", FAMILIES)
def test_tools_that_stand_before_the_last_user_turn_move_no_earlier_turn(name: str) -> None:
    messages = CONVERSATIONS["calls of several rounds"]
    pieces, whole, _ = read(name, {"messages": messages, "tools": [{"name": "f"}]}, train_on="all")
    assert pieces == expected(name, whole, 5)


def test_calls_are_given_as_the_template_wants_them() -> None:
    """R1's template shows a call only where the content is null, and joins its arguments as text."""
    said = read("r1", {"messages": [USER, call("f")]})[0]
    assert said == ['<tool_call>f {"of": "x"}</tool_call></s>']
    assert read("r1", {"messages": [USER, call("f"), RESULT, DONE]})[0] == ["12 degrees.</s>"]
    pieces, _, notes = read("r1", {"messages": [USER, call("f", content="Wait."), RESULT, DONE]}, train_on="all")
    assert pieces == ["Wait.</s>", "12 degrees.</s>"]
    assert "does not show tool_calls" in notes[0]


words = st.sampled_from(["12", "ab c", "a", "Paris.", "a < b", "12 C", "f", "x\n\ny", "Ж", "{}", "get f(x)"])
calls = st.lists(st.sampled_from(["f", "get", "ab"]), min_size=1, max_size=2)
arguments = st.sampled_from([{}, {"n": 1}, {"a": {"b": True}}, {"a": "x", "n": 0.5}])
answers = st.one_of(
    st.builds(lambda text: {"role": "assistant", "content": text}, words),
    st.builds(lambda text, why: {"role": "assistant", "content": text, "reasoning_content": why}, words, words),
    st.builds(lambda names: call(*names), calls),
    st.builds(lambda names, text: call(*names, content=text), calls, words),
    st.builds(lambda names, why: call(*names, reasoning_content=why), calls, words),
    st.builds(lambda names, why, of: call(*names, reasoning_content=why, arguments=of), calls, words, arguments),
)
rounds = st.builds(
    lambda asked, turns, results: [
        {"role": "user", "content": asked},
        *(
            each
            for turn in turns
            for each in [turn, *({"role": "tool", "content": results} for _ in turn.get("tool_calls", ()))]
        ),
    ],
    words,
    st.lists(answers, min_size=1, max_size=3),
    words,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), st.lists(rounds, min_size=1, max_size=3), st.booleans())
def test_any_conversation_has_exactly_its_assistant_turns_trained(name: str, parts: list[Any], system: bool) -> None:
    messages = [message for part in parts for message in part]
    if system:
        messages = [{"role": "system", "content": "Be brief."}, *messages]
    count = sum(message["role"] == "assistant" for message in messages)
    pieces, whole, _ = read(name, {"messages": messages}, train_on="all", max_length=10_000)
    assert pieces == expected(name, whole, count)
    assert len(FAMILIES[name].turns(whole)) == count


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), st.lists(rounds, min_size=1, max_size=3), st.data())
def test_marks_leave_out_the_turns_that_they_mask_and_no_other(name: str, parts: list[Any], data: Any) -> None:
    messages = [dict(message) for part in parts for message in part]
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    kept = data.draw(st.sets(st.sampled_from(places), min_size=1))
    for place in places:
        key, values = data.draw(st.sampled_from([("weight", (0, 1)), ("train", (False, True))]))
        messages[place][key] = values[place in kept]
    pieces, whole, _ = read(name, {"messages": messages}, max_length=10_000)
    turns = FAMILIES[name].turns(whole)
    assert "".join(pieces) == "".join(turns[places.index(place)] for place in sorted(kept))
