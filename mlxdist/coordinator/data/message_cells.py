"""Text cells that really hold messages: decoded where they are JSON, refused with the cure where they are not.

CSV has nothing but text, and pandas writes lists and empty cells into any file as Python shows them.
"""

import re
from collections.abc import Mapping
from typing import Any

from mlxdist.coordinator.data.text_files import TwiceError, parse_json
from mlxdist.coordinator.encode.row_errors import RowError

CONVERSATIONS = ("messages", "prompt", "completion", "chosen", "rejected")  # fields that may hold messages
OBJECTS = ("tools", "chat_template_kwargs")  # fields that hold a list or a table
TEXTS = ("text",)  # a field that holds nothing but text
_SHOWN = re.compile(r"""[\[(]?\s*\{\s*['"](?:role|from|content|value)['"]\s*:""")  # how a list of messages begins
_NAN = ("nan", "NaN", "<NA>")
NO_VALUE = (
    "pandas writes it for a cell without a value; leave such rows out (df.dropna()) or write empty text (df.fillna(''))"
)


def decoded(field: str, value: Any, column: str = "") -> Any:
    """The value of one of our fields, messages out of their text. Raises RowError for those in another writing.

    `column`: the name to blame, where it is not the field's.
    """
    if field not in CONVERSATIONS + OBJECTS + TEXTS:
        return value
    if isinstance(value, float) and value != value:
        wanted = "text" if field in TEXTS else "text or a list of messages"
        raise RowError(f"{column or field} is a number (nan), not {wanted}: {NO_VALUE}")
    if isinstance(value, Mapping) and field in CONVERSATIONS and _is_message(value):
        return [value]
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text in _NAN:
        raise RowError(f"{column or field} is the text {text!r}: {NO_VALUE}")
    if text[:1] not in ("[", "{", "("):
        return value
    if field in OBJECTS or field == "messages" or _SHOWN.match(text):
        return _messages(field, value, text)
    return value


def _messages(field: str, value: str, text: str) -> Any:
    """The messages, or the list or table, that `text` writes; `value` where it writes something else."""
    try:
        found = parse_json(text)
    except TwiceError as error:
        raise RowError(f"{field} holds JSON in which {error}") from error
    except (ValueError, RecursionError) as error:
        if field != "messages" and not _SHOWN.match(text):
            return value
        raise RowError(
            f"{field} is text that shows messages but is no JSON, as str() of a Python list: write lists themselves "
            "(pandas: df.to_json('train.jsonl', orient='records', lines=True)), or json.dumps(messages) into the cell"
        ) from error
    if field in OBJECTS:
        return found
    if isinstance(found, dict):
        found = [found]
    if field != "messages" and not all(isinstance(each, dict) and _is_message(each) for each in found):
        return value  # JSON that a person writes about
    if field in TEXTS:
        raise RowError(f'{field} is text that holds messages: read them with data.columns = {{messages = "{field}"}}')
    return found


def _is_message(value: Mapping[str, Any]) -> bool:
    return ("role" in value and ("content" in value or "tool_calls" in value)) or {"from", "value"} <= value.keys()
