"""Tool calls and tool schemas as templates expect them: arguments as objects, without the keys that Parquet fills in.

Every function raises RowError with the path of what is wrong, such as messages[1].tool_calls[0].function.arguments.
"""

import json
from typing import Any

from mlxdist.coordinator.encode.row_errors import RowError, kind_of


def calls_of(value: object, field: str) -> list[dict[str, Any]]:
    """The tool calls of one message, each call's arguments as an object.

    Arguments may be an object or JSON text, which is OpenAI's form; none at all count as {}.
    """
    if not isinstance(value, list):
        raise RowError(f"{field} is {kind_of(value)}, not a list of calls")
    return [_call(each, f"{field}[{place}]") for place, each in enumerate(value)]


def call_turn(value: object, field: str) -> dict[str, Any]:
    """The assistant turn of ShareGPT's function_call: JSON text of one call or of a list of calls."""
    calls = _parsed(value, field) if isinstance(value, str) else value
    listed = calls if isinstance(calls, list) else [calls]
    found = calls_of(listed, field) if isinstance(calls, list) else [_call(calls, field)]
    return {"role": "assistant", "content": "", "tool_calls": found}


def without_nulls(value: Any) -> Any:
    """`value` without the keys that are null, at any depth.

    Parquet gives every row the keys of all rows. An object of which nothing is left was filled in as well.
    """
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    if not isinstance(value, dict):
        return value
    kept = ((key, item, without_nulls(item)) for key, item in value.items() if item is not None)
    return {key: clean for key, item, clean in kept if clean != {} or item == {}}


def _call(value: object, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RowError(f"{field} is {kind_of(value)}, not a call with a function's name and arguments")
    call = {key: item for key, item in value.items() if item is not None}
    inner, path = call.get("function"), f"{field}.function"
    if inner is None:  # the call itself has name and arguments
        inner, path = {key: call.pop(key) for key in ("name", "arguments") if key in call}, field
    if not isinstance(inner, dict):
        raise RowError(f"{path} is {kind_of(inner)}, not an object with name and arguments")
    name = inner.get("name")
    if not isinstance(name, str) or not name:
        raise RowError(f"{path}.name is {'missing' if name is None else kind_of(name) if name else 'empty'}")
    function = {key: item for key, item in inner.items() if item is not None}
    function["arguments"] = _arguments(inner.get("arguments"), f"{path}.arguments")
    return {"type": "function", **call, "function": function}


def _arguments(value: object, field: str) -> dict[str, Any]:
    if value is None:
        return {}
    # a null inside JSON text was written there on purpose: Parquet fills columns, not texts
    arguments = _parsed(value, field) if isinstance(value, str) else without_nulls(value)
    if not isinstance(arguments, dict):
        raise RowError(f"{field} is {kind_of(arguments)}, not an object")
    return arguments


def _parsed(text: str, field: str) -> Any:
    twice: list[str] = []

    def made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice.extend(name for name in names if names.count(name) > 1)
        return dict(pairs)

    try:
        found = json.loads(text, object_pairs_hook=made)
    except (json.JSONDecodeError, RecursionError) as error:
        raise RowError(
            f"{field} is text that is no JSON object ({getattr(error, 'msg', 'nested too deeply')})"
        ) from error
    if twice:
        raise RowError(f"{field} is text in which the key {twice[0]!r} stands twice in one object; keep one of them")
    return found
