"""The turns of a long conversation are those that renders find one by one, in a number of renders that stays small."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxdist.coordinator.encode.assistant_spans import rendered, turn
from mlxdist.coordinator.encode.chat_template import ChatTemplate
from mlxdist.coordinator.encode.many_turns import FEW, content_places, turns
from mlxdist.coordinator.encode.row_errors import RowError
from tests.coordinator.data.chat_templates import FAMILIES, jinja
from tests.coordinator.data.test_chat_families import TEMPLATES, rounds

CALLS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}</>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Counted:
    """A template that counts its renders."""

    def __init__(self, apply: Callable[..., str]) -> None:
        self.apply, self.count = apply, 0

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        self.count += 1
        return self.apply(*args, **kwargs)


def long_conversation(count: int) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[place % 2], "content": f" words of {place}. "} for place in range(2 * count)]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_number_of_renders_does_not_grow_with_the_turns(name: str) -> None:
    counts = []
    for count in (12, 24):
        template = Counted(jinja(FAMILIES[name].source))
        whole = rendered(long_conversation(count), ChatTemplate(template), {})
        places = range(1, 2 * count, 2)
        found = turns(whole, places)
        counts.append(template.count)
        assert found == [turn(whole, place) for place in places]
    assert counts[0] == counts[1] < 36


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), st.lists(rounds, min_size=FEW + 1, max_size=12), st.booleans())
def test_many_turns_of_any_kind_lie_where_each_is_found_by_itself(name: str, parts: list[Any], system: bool) -> None:
    messages = [message for part in parts for message in part]
    if system:
        messages = [{"role": "system", "content": "Be brief."}, *messages]
    whole = rendered(messages, ChatTemplate(TEMPLATES[name]), {})
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    found, alone = turns(whole, places), [turn(whole, place) for place in places]
    assert [(each.start, each.end) for each in found] == [(each.start, each.end) for each in alone]
    assert found == alone


def test_a_template_that_shows_contents_in_another_order_or_form_has_no_places() -> None:
    for source in (
        "{% for m in messages | reverse %}{{ m.content }};{% endfor %}",
        "{% for m in messages %}{{ m.content | tojson }};{% endfor %}",
        "{% for m in messages %}{{ m.content | length }}{{ m.content }};{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content }};{% endfor %}",
    ):
        messages = [{"role": "user", "content": 'a "b"'}, {"role": "assistant", "content": "c"}]
        whole = rendered(messages, ChatTemplate(jinja(source)), {})
        places = content_places(whole)
        assert all(whole.text[start:end] == messages[at]["content"] for at, (start, end) in places.items())


def test_a_turn_among_many_that_the_template_leaves_out_is_refused() -> None:
    source = "{% for m in messages %}{% if loop.index0 != 7 %}<{{ m.role }}>{{ m.content }}</>{% endif %}{% endfor %}"
    whole = rendered(long_conversation(20), ChatTemplate(jinja(source)), {})
    with pytest.raises(RowError, match="leaves out turn 8"):
        turns(whole, range(1, 40, 2))


def calling(count: int) -> list[dict[str, Any]]:
    """Questions, each answered by a call with its own words, its result, and an answer."""

    def call(place: int) -> dict[str, Any]:
        function = {"name": "look_up", "arguments": {"word": f"word {place}"}}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}

    turns_of = (
        (
            {"role": "user", "content": f"question {place}"},
            call(place),
            {"role": "tool", "content": f"result {place}"},
            {"role": "assistant", "content": f"answer {place}"},
        )
        for place in range(count)
    )
    return [message for each in turns_of for message in each]


@pytest.mark.parametrize("name", ["qwen", "chatml calls"])
def test_calls_with_other_words_in_each_are_found_alike(name: str) -> None:
    source = CALLS if name == "chatml calls" else FAMILIES[name].source
    counts = []
    for count in (8, 16):
        template = Counted(jinja(source))
        messages = calling(count)
        whole = rendered(messages, ChatTemplate(template), {})
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        before = template.count
        found = turns(whole, places)
        counts.append(template.count - before)
        assert found == [turn(whole, place) for place in places]
    assert counts[0] == counts[1]
