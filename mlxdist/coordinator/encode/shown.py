"""Differences between a conversation and what its chat template shows of it, found by rendering with and without."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mlxdist.coordinator.encode.assistant_spans import Conversation, Turn, own_words, rendered, turn
from mlxdist.coordinator.encode.chat_template import ChatTemplate
from mlxdist.coordinator.encode.messages import REASONING, Message
from mlxdist.coordinator.encode.remarks import Remark
from mlxdist.coordinator.encode.row_errors import RowError

# Keys of a message that link or name things for programs; templates need not show them.
PLUMBING = frozenset({"role", "content", "tool_call_id", "id"})
SURE = 24  # characters: a longer text that stands in the render is not there by chance
_THOUGHT = re.compile("think|thought|reason", re.IGNORECASE)
LONGEST = 60  # characters of an insertion that are quoted


def unused(whole: Conversation) -> list[Remark]:
    """The fields, the roles and the tools of a conversation without which its render is the same.

    A field counts as used where the template would show it if the conversation ended with its message: many templates
    show the reasoning of the last turn alone.
    """
    messages = whole.messages
    keys = dict.fromkeys(key for message in messages for key in message if key not in PLUMBING)
    roles = dict.fromkeys(each["role"] for each in messages if each["role"] not in ("user", "assistant"))
    found = [key for key in keys if _field_unused(whole, key)]
    for role in roles:
        contents = [each["content"] for each in messages if each["role"] == role]
        if _unused(whole, contents, [each for each in messages if each["role"] != role]):
            found.append(f"{role} turns")
    if "tools" in whole.kwargs:
        kwargs = {key: value for key, value in whole.kwargs.items() if key != "tools"}
        if Conversation(messages, whole.template, kwargs, "").render(messages) == whole.text:
            found.append("tools")
    return [Remark("unused", name) for name in found]


def turn_remarks(
    whole: Conversation, place: int, found: Turn, template: ChatTemplate, unshown: Sequence[Remark] = ()
) -> list[Remark]:
    """The parts that the template removed from a trained turn or inserted, with the argument that changes it.

    `unshown` are the remarks on fields that it never shows: these are said once, not for each turn. Of insertions only
    thoughts are told: what stands before a turn's words otherwise is the way in which the template writes turns.
    """
    missing = {remark.what for remark in unshown}
    message = {key: value for key, value in whole.messages[place].items() if key not in missing}
    text = whole.text[found.start : found.end]
    content, thoughts = message["content"].strip(), _thoughts(message)
    if content and not thoughts and text.lstrip().startswith(content):
        return []
    remarks = []
    for what, words in _parts(message):
        if words and _squeezed(words) not in _squeezed(text):
            cure = _cure(whole, place, template, f"removed {what}", partial(_holds, words, True))
            remarks.append(Remark("removed", what, cure))
    inserted = "" if thoughts or not _THOUGHT.search(text) else _inserted(whole, place, found, content)
    if _THOUGHT.search(inserted):
        said = repr(inserted if len(inserted) <= LONGEST else inserted[:LONGEST] + "…")
        cure = _cure(whole, place, template, f"inserted {inserted}", partial(_holds, inserted, False))
        remarks.append(Remark("inserted", said, cure))
    return remarks


def _field_unused(whole: Conversation, key: str) -> bool:
    messages = whole.messages
    if not _unused(whole, _texts(messages, key), _without(messages, key)):
        return False
    last = max(place for place, message in enumerate(messages) if key in message) + 1
    return last == len(messages) or whole.part(last) == (whole.render(_without(messages[:last], key)) or "")


def _unused(whole: Conversation, texts: Sequence[str], without: Sequence[Message]) -> bool:
    if texts and all(len(text) >= SURE and text in whole.text for text in texts):
        return False
    return whole.render(without) == whole.text


def _texts(messages: Sequence[Message], key: str) -> list[str]:
    """The values of `key`, none where one is no text and may stand in the render in another form."""
    values = [message[key] for message in messages if key in message]
    return [value.strip() for value in values] if all(isinstance(value, str) for value in values) else []


def _without(messages: Sequence[Message], key: str) -> list[Message]:
    return [{name: value for name, value in message.items() if name != key} for message in messages]


def _parts(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The parts of a turn as (name, words): its reasoning, its content without reasoning, its calls' functions."""
    answer = message["content"].rpartition("</think>")[2].strip()
    calls = [("tool_calls", call["function"]["name"]) for call in message.get("tool_calls", ())]
    return [*(("reasoning", thought) for thought in _thoughts(message)), ("content", answer), *calls]


def _thoughts(message: Mapping[str, Any]) -> list[str]:
    fields = [message[key].strip() for key in REASONING if isinstance(message.get(key), str)]
    inline = message["content"].rpartition("</think>")[0].strip().removeprefix("<think>").strip()
    return [thought for thought in (*fields, inline) if thought]


def _inserted(whole: Conversation, place: int, found: Turn, content: str) -> str:
    """The text of a turn before its own words."""
    text = whole.text[found.start : found.end]
    if content in text and not whole.messages[place].get("tool_calls"):
        return text[: text.index(content)].strip()
    return whole.text[found.start : own_words(whole, place)].strip()


def _cure(whole: Conversation, place: int, template: ChatTemplate, change: str, cured: Callable[[str], bool]) -> str:
    """The argument of the template, as `name = true`, with which a turn's text is cured; "" for none.

    Tried once for each change that the template makes.
    """
    if change not in template.cures:
        template.cures[change] = ""
        for name in template.switches:
            for value in (True, False):
                after = _turn_text(whole, place, {**whole.kwargs, name: value})
                if after.strip() and cured(after):
                    template.cures[change] = f"{name} = {str(value).lower()}"
                    return template.cures[change]
    return template.cures[change]


def _turn_text(whole: Conversation, place: int, kwargs: Mapping[str, Any]) -> str:
    """The turn's text under other arguments, "" where the template refuses them."""
    try:
        other = rendered(whole.messages, whole.template, kwargs)
        found = turn(other, place)
    except (RowError, AssertionError):
        return ""
    return other.text[found.start : found.end]


def _holds(words: str, wanted: bool, text: str) -> bool:
    return (_squeezed(words) in _squeezed(text)) == wanted


def _squeezed(text: str) -> str:
    return " ".join(text.split())
