"""A prompt and its responses, brought to one form however a row writes them.

Rows repeat the prompt in their responses, give it as a text beside conversations, or give none. Every function raises
RowError where two of these contradict each other.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxdist.coordinator.encode.boundaries import common_prefix
from mlxdist.coordinator.encode.encoding import Encoding
from mlxdist.coordinator.encode.messages import (
    TEXT_OR_MESSAGES,
    Message,
    Messages,
    as_messages,
    filled_text,
    messages_of,
    text_of,
)
from mlxdist.coordinator.encode.remarks import Remark
from mlxdist.coordinator.encode.row_errors import RowError
from mlxdist.protocol.methods import METHODS

# A text that writes a conversation out: "Human: …" at the start of a line.
_SPEAKER = re.compile(r"^\W*(human|user|assistant|question|instruction|response)\s*:", re.IGNORECASE | re.MULTILINE)
_OPENERS = ("system", "developer", "user")


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt and its responses, each a text or messages. Where responses are messages, the prompt is too."""

    prompt: str | list[Message] | None  # None: to be told from two responses of text
    responses: tuple[str | list[Message], ...]
    remarks: tuple[Remark, ...] = ()


def exchange_of(fields: Mapping[str, Any], names: Sequence[str], encoding: Encoding) -> Exchange:
    """The prompt of a row and its responses, the fields of these `names`."""
    prompt, responses = fields.get("prompt"), [fields[name] for name in names]
    if any(isinstance(each, list) for each in responses):
        return _of_messages(fields, names)
    texts = [_text(each, name) for each, name in zip(responses, names, strict=True)]
    if prompt is None:
        return Exchange(None, tuple(texts))
    if not isinstance(prompt, str):
        opening = messages_of(prompt, "prompt", TEXT_OR_MESSAGES)
        if not METHODS[encoding.config.method].losses:  # for pairs the text follows the generation prompt as it stands
            return Exchange(opening, tuple(_answer(text) for text in texts))
        return Exchange(opening, tuple(texts))
    words, texts, remarks = _without_repetition(text_of(prompt, "prompt"), texts)
    if not encoding.wraps:
        return Exchange(words, tuple(texts), remarks)
    return Exchange([*_system(fields), _user(words)], tuple(_answer(text) for text in texts), remarks)


def _of_messages(fields: Mapping[str, Any], names: Sequence[str]) -> Exchange:
    prompt = fields.get("prompt")
    lists = [as_messages(fields[name], name, "assistant") for name in names]
    written = isinstance(prompt, str)
    if isinstance(prompt, str) and prompt.strip():
        opening = [*_system(fields), *as_messages(prompt, "prompt", "user")]
    else:
        opening = messages_of(prompt, "prompt", TEXT_OR_MESSAGES) if prompt and not written else []
    if len(lists) == 2 and not isinstance(prompt, list):
        shared = common_prefix(_keys(lists[0]), _keys(lists[1]))
        if shared in map(len, lists):
            raise RowError("chosen and rejected do not part in any message, so no prompt can be told from them")
        if shared and any(each["role"] == "user" for each in lists[0][:shared]):
            return _shared_prompt(lists, shared, opening)
    parted = [_parted(opening, each) for each in lists]
    prompts, rests = [each for each, _ in parted], [each for _, each in parted]
    repeated = bool(opening) and any(len(rest) < len(each) for rest, each in zip(rests, lists, strict=True))
    leads = [list(_leading(rest)) for rest in rests]
    if any(leads) or any(_keys(each) != _keys(prompts[0]) for each in prompts):
        prompts = [_prompt_of(each, lead, name) for each, lead, name in zip(prompts, leads, names, strict=True)]
        if any(_keys(each) != _keys(prompts[0]) for each in prompts):
            raise RowError("chosen and rejected have different prompts: they must answer the same conversation")
        rests = [rest[len(lead) :] for rest, lead in zip(rests, leads, strict=True)]
    if written and not prompts[0]:
        raise RowError("prompt is empty")
    if not all(rests):
        raise RowError(f"{names[0] if not rests[0] else names[-1]} has no turn after the prompt")
    return Exchange(prompts[0], tuple(rests), (Remark("repeated"),) if repeated else ())


def _shared_prompt(lists: Sequence[list[Message]], shared: int, opening: Sequence[Message]) -> Exchange:
    """Two whole conversations: what they share in whole messages is the prompt, whatever the text of `prompt` says."""
    conversation = lists[0][:shared]
    rests = tuple(each[shared:] for each in lists)
    for rest, name in zip(rests, ("chosen", "rejected"), strict=True):
        if rest[0]["role"] in _OPENERS:
            raise RowError(f"chosen and rejected have different prompts: {name} goes on with a {rest[0]['role']} turn")
    remarks = (Remark("repeated"),) if opening else ()
    if opening and _key(opening[-1]) not in _keys(conversation):
        remarks = (Remark("prompt unread"),)
    elif opening and opening[0]["role"] == "system" and conversation[0]["role"] != "system":
        conversation = [opening[0], *conversation]  # of the row's system column
    return Exchange(conversation, rests, remarks)


def _parted(opening: list[Message], turns: list[Message]) -> tuple[list[Message], list[Message]]:
    """The prompt and the response of a conversation that may begin with the prompt.

    It may bring a system turn that the prompt does not have, or leave out the prompt's.
    """
    keys, wanted = _keys(turns), _keys(opening)
    bare = [key for key in wanted if key[0] not in ("system", "developer")]
    whole = turns[0]["role"] in _OPENERS  # a response that begins with an answer may hold the prompt's words later on
    for size in range(len(turns), 0, -1):
        start = size - len(wanted)
        if wanted and keys[max(start, 0) : size] == wanted and (whole or not start):
            return turns[:size], turns[size:]
        if bare and size == len(bare) and keys[:size] == bare:
            return opening, turns[size:]
    return opening, turns


def _prompt_of(prompt: list[Message], lead: list[Message], name: str) -> list[Message]:
    """The prompt with the system and user turns that a response begins with, where it has no such turns itself."""
    if not lead:
        return prompt
    mine, theirs = ({message["role"] for message in each} for each in (prompt, lead))
    if "user" not in theirs and not mine & {"system", "developer"}:
        return [*lead, *prompt]
    if "user" in mine:
        raise RowError(f"{name} begins with a {lead[0]['role']} turn that is not the prompt's: the prompts differ")
    return [*prompt, *lead]


def _leading(turns: Messages) -> Sequence[Message]:
    """The turns of the system and the user at the beginning."""
    count = next((place for place, each in enumerate(turns) if each["role"] not in _OPENERS), len(turns))
    return [dict(each) for each in turns[:count]]


def _without_repetition(prompt: str, texts: list[str]) -> tuple[str, list[str], tuple[Remark, ...]]:
    """Texts that are whole conversations, the prompt in front, without it.

    Only a prompt that writes a conversation out ("Human: …") is taken for one: an answer may repeat a question's words.
    """
    repeats = _SPEAKER.search(prompt) and all(text.startswith(prompt) and text != prompt for text in texts)
    if not repeats:
        return prompt, texts, ()
    return prompt, [text[len(prompt) :] for text in texts], (Remark("repeated"),)


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        messages_of(value, name, TEXT_OR_MESSAGES)  # says what it is
    return filled_text(value, name)


def _system(fields: Mapping[str, Any]) -> list[Message]:
    """The system turn of a row with a column of that name, none where it is blank."""
    system = fields.get("system")
    return (
        [{"role": "system", "content": system}] if isinstance(system, str) and text_of(system, "system").strip() else []
    )


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _answer(text: str) -> list[Message]:
    return [{"role": "assistant", "content": text}]


def _keys(messages: Messages) -> list[tuple[str, str, str]]:
    return [_key(each) for each in messages]


def _key(message: Mapping[str, Any]) -> tuple[str, str, str]:
    """The parts by which two messages are the same: ids and other fields do not count."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return message["role"], message["content"].strip(), repr(calls) if calls else ""
