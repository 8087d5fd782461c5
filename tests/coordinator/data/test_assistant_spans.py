"""An assistant's turn is found in the render by comparing renders, whatever the template does to other turns."""

from collections.abc import Callable
from typing import Any

import pytest

from mlxdist.coordinator.encode.assistant_spans import rendered, turn
from mlxdist.coordinator.encode.boundaries import common_prefix
from mlxdist.coordinator.encode.chat_template import ChatTemplate
from mlxdist.coordinator.encode.row_errors import RowError
from tests.coordinator.data.data_toys import thinking_template, toy_template

Template = Callable[..., str]


def says(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def turn_text(messages: list[dict[str, Any]], place: int, template: Template, **kwargs: Any) -> str:
    whole = rendered(messages, ChatTemplate(template), kwargs)
    found = turn(whole, place)
    start = common_prefix(whole.text, found.before)
    end = len(whole.text) if found.through is None else common_prefix(whole.text, found.through)
    return whole.text[start:end]


FOUR = [says("user", "hi"), says("assistant", "yo"), says("user", "more"), says("assistant", "done")]


@pytest.mark.parametrize("template", [toy_template, thinking_template])
def test_each_turn_is_its_content_and_its_end(template: Template) -> None:
    assert turn_text(FOUR, 1, template) == "yo</>"
    assert turn_text(FOUR, 3, template).endswith("done</>")


def test_a_turn_whose_thinking_was_dropped_is_what_is_left_of_it() -> None:
    messages = [*FOUR]
    messages[1] = says("assistant", "<think>long thought</think>yo")
    assert turn_text(messages, 1, thinking_template) == "yo</>"


def test_words_that_stand_elsewhere_too_do_not_move_a_turn() -> None:
    same = [says("user", "yo"), says("assistant", "yo"), says("user", "yo"), says("assistant", "yo")]
    whole = rendered(same, ChatTemplate(thinking_template), {})
    found = turn(whole, 1)
    assert (whole.text[: len(found.before)], found.through) == (
        "<user>yo</><assistant>",
        "<user>yo</><assistant>yo</>",
    )


def test_a_tool_answer_is_never_part_of_a_turn() -> None:
    """The prefix before the last turn is rendered with thoughts that the whole render has dropped."""
    messages = [
        says("user", "q"),
        says("assistant", "<think>a</think>call"),
        says("tool", "42"),
        says("assistant", "<think>b</think>it is 42"),
        says("user", "thanks"),
        says("assistant", "<think>c</think>welcome"),
    ]
    assert turn_text(messages, 1, thinking_template) == "call</>"
    assert turn_text(messages, 3, thinking_template) == "it is 42</>"
    assert turn_text(messages, 5, thinking_template) == "<think>c</think>welcome</>"


def opens_a_thought(messages: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool) -> str:
    """As DeepSeek-R1's: a generation prompt ends in <think>, a render shows only what was said."""
    text = "".join(f"<{message['role']}>{message['content'].split('</think>')[-1]}</>" for message in messages)
    return text + ("<assistant><think>\n" if add_generation_prompt else "")


def test_a_generation_prompt_that_opens_a_thought_leaves_the_answer_trained() -> None:
    assert turn_text([says("user", "q"), says("assistant", "a")], 1, opens_a_thought) == "a</>"
    thought = [says("user", "q"), says("assistant", "<think>\nx</think>a"), says("user", "r"), says("assistant", "b")]
    assert turn_text(thought, 1, opens_a_thought) == "a</>"


@pytest.mark.parametrize("words", ["<tool>x", "<think >x", "<t", "a < b"])
def test_a_turn_that_begins_with_a_tag_is_not_cut_inside_it(words: str) -> None:
    """The generation prompt's "<think>" shares the first characters of another tag."""
    assert turn_text([says("user", "q"), says("assistant", words)], 1, opens_a_thought) == f"{words}</>"


def test_a_template_that_refuses_a_part_still_shows_the_turn() -> None:
    def ends_with_user(messages: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool) -> str:
        if add_generation_prompt:
            raise ValueError("no generation prompt here")
        return toy_template(messages, tokenize=tokenize, add_generation_prompt=False)

    assert turn_text(FOUR, 3, ends_with_user) == "done</>"


def test_a_turn_that_the_template_leaves_out_is_refused_not_guessed() -> None:
    def first_two(messages: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool) -> str:
        kept = [messages[0], *messages[-1:]] if len(messages) > 1 else messages
        return toy_template(kept, tokenize=tokenize, add_generation_prompt=False)

    with pytest.raises(RowError, match="leaves out turn 2"):
        turn_text(FOUR, 1, first_two)
