"""The values of a row's fields: texts and conversations, checked before anything is rendered.

Every function raises RowError with a reason that names the field.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mlxdist.coordinator.encode.row_errors import RowError, kind_of
from mlxdist.coordinator.encode.tool_calls import call_turn, calls_of, without_nulls

REASONING = ("reasoning_content", "reasoning", "thinking")  # fields that hold an assistant's thoughts

Message = dict[str, Any]
Messages = Sequence[Mapping[str, Any]]

TEXT_OR_MESSAGES = "text or a list of messages"

# The other spelling of conversations, {"from": …, "value": …}, and its names of roles.
OTHER_ROLES = {
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"},
    **{"observation": "tool", "tool_response": "tool", "function_response": "tool"},
}
CALLS = ("function_call", "tool_call")  # in the same spelling, an assistant turn that is a call
MARKS = ("weight", "train")  # of a turn: 0 or false keeps it from being trained


class Renderer(Protocol):
    """Messages to text."""

    def render(self, messages: Messages, add_generation_prompt: bool, **kwargs: Any) -> str:
        """The conversation as the model reads it; with `add_generation_prompt`, up to where the assistant speaks."""
        ...


def last_assistant(messages: Messages) -> int:
    """The place of the last assistant turn, -1 for none."""
    return max((place for place, message in enumerate(messages) if message.get("role") == "assistant"), default=-1)


def text_of(value: object, field: str) -> str:
    """`value` if it is text."""
    if not isinstance(value, str):
        raise RowError(f"{field} is {kind_of(value)}, not text")
    if not value.isascii():
        _check_unicode(value, field)
    return value


def filled_text(value: object, field: str) -> str:
    """`value` if it is text and not blank."""
    text = text_of(value, field)
    if not text.strip():
        raise RowError(f"{field} is empty")
    return text


def messages_of(value: object, field: str, wanted: str = "a list of messages") -> list[Message]:
    """The messages of a conversation, each with role and content as text, without its marks and fields that are null.

    {"from", "value"} pairs are read as {"role", "content"}, lists of text parts as one text.
    """
    if not isinstance(value, list):
        raise RowError(f"{field} is {kind_of(value)}, not {wanted}")
    if not value:
        raise RowError(f"{field} is an empty list")
    return [_message(each, f"{field}[{place}]") for place, each in enumerate(value)]


def marks_of(value: object, field: str) -> list[bool | None]:
    """The mark of each message of a conversation: True to train it, False not to, None where it has no mark.

    A mark is weight (0 or 1) or train (true or false).
    """
    if not isinstance(value, list):
        return []
    return [_mark(each, f"{field}[{place}]") if isinstance(each, dict) else None for place, each in enumerate(value)]


def as_messages(value: object, field: str, role: str) -> list[Message]:
    """A conversation as it is; a text as one message of `role`."""
    if isinstance(value, str):
        return [{"role": role, "content": filled_text(value, field)}]
    return messages_of(value, field, TEXT_OR_MESSAGES)


def tools_of(value: object) -> list[Any] | None:
    """The tools of a row: a list, or a list as JSON text; null, blank text and an empty list are none."""
    written = isinstance(value, str)
    if isinstance(value, str) and not value.strip():
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise RowError(f"tools is text that is no JSON ({error.msg})") from error
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise RowError(f"tools is {kind_of(value)}, not a list")
    return value if written else without_nulls(value)  # a null that stands in text was not filled in by Parquet


def kwargs_of(value: object) -> dict[str, Any]:
    """A row's own arguments for the chat template."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise RowError(f"chat_template_kwargs is {kind_of(value)}, not a table of arguments")
    return {key: item for key, item in value.items() if item is not None}  # null: filled in by Parquet


def is_empty_turn(message: Mapping[str, Any]) -> bool:
    """True where a message says nothing: no content, no reasoning, no tool call."""
    spoken = (message.get(key) for key in ("content", *REASONING))
    return not message.get("tool_calls") and not any(isinstance(text, str) and text.strip() for text in spoken)


def _message(value: object, field: str) -> Message:
    if not isinstance(value, dict):
        raise RowError(f"{field} is {kind_of(value)}, not a message with role and content")
    message = {key: item for key, item in value.items() if item is not None and key not in MARKS}
    if "role" not in message and "from" in message:
        said, words = text_of(message.pop("from"), f"{field}.from"), message.pop("value", None)
        if said in CALLS:
            return {**call_turn(words, f"{field}.value"), **message}
        message = {"role": OTHER_ROLES.get(said, said), "content": words, **message}
    if "role" not in message:
        raise RowError(f"{field} has no role")
    if not text_of(message["role"], f"{field}.role"):
        raise RowError(f"{field}.role is empty")
    if message["role"] == "function":  # with function_call, OpenAI's older form of a call and its answer
        message["role"] = "tool"
    if message.get("function_call") and not message.get("tool_calls") and not message.get("content"):
        message["tool_calls"] = call_turn(message.pop("function_call"), f"{field}.function_call")["tool_calls"]
    elif message.get("tool_calls"):
        message["tool_calls"] = calls_of(message["tool_calls"], f"{field}.tool_calls")
    else:  # an empty list is no call; some templates would open a block for it
        message.pop("tool_calls", None)
    content = message.get("content", "" if message.keys() & {"tool_calls", *REASONING} else None)
    if content is None:
        raise RowError(f"{field}.content is missing")
    if isinstance(content, list):
        return {**message, "content": _joined(content, field)}
    return {**message, "content": text_of(content, f"{field}.content")}


def _mark(message: Mapping[str, Any], field: str) -> bool | None:
    weight, train = (message.get(key) for key in MARKS)
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise RowError(f"{field}.weight is {kind_of(weight)}, and must be 0 or 1")
    if train is not None and not isinstance(train, bool):
        raise RowError(f"{field}.train is {kind_of(train)}, and must be true or false")
    if None not in (weight, train) and bool(weight) != train:
        raise RowError(f"{field} has weight {weight} and train {str(train).lower()}, which contradict each other")
    return train if weight is None else bool(weight)


def _joined(parts: list[Any], field: str) -> str:
    texts = []
    for place, part in enumerate(parts):
        kind = (part.get("type") or "text") if isinstance(part, dict) else kind_of(part)
        if not isinstance(part, dict) or kind != "text":
            raise RowError(f"{field}.content[{place}] is {kind}; only text parts are trained")
        texts.append(text_of(part.get("text"), f"{field}.content[{place}].text"))
    return "".join(texts)


def _check_unicode(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        what = "a byte that is no UTF-8" if 0xDC80 <= code <= 0xDCFF else f"half a character (\\u{code:04x})"
        raise RowError(f"{field} has {what} at place {error.start + 1}") from error
