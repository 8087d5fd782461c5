"""Checks one configuration value by the type of its field, and describes in words what the field takes.

A field's annotation is the only place that knows its type and range. msgspec does the checking:

    size: Annotated[int, Meta(ge=1)] = 8           must be a whole number, at least 1
    schedule: Literal["constant", "linear"]        must be "constant" or "linear"
    save_every: Count | Literal["auto"]            must be a whole number, at least 1, or "auto"
"""

import json
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from mlxdist.coordinator.config.unknown_keys import nearest

Text = Annotated[str, Meta(pattern=r"\S", description="text in quotes, not empty")]
UNIONS = (Union, types.UnionType)
SHOWN = 60  # characters of a value in a message


def checked(hint: Any, value: object) -> Any:
    """Returns `value` as the type `hint` holds it: a list becomes a tuple, 1 becomes 1.0 where a number is asked for.

    Raises ValueError("must be …") for a wrong type or range. In TOML true is not 1, "8" is not 8, and 8.0 is not whole.
    """
    choices = _choices(hint)
    for choice in choices if _fits_json(value) else ():  # one by one: msgspec has no Count | Literal[0], both being int
        with suppress(msgspec.ValidationError):
            return msgspec.convert(value, Text if choice is Path else choice)
    literals = [literal for choice in choices if get_origin(choice) is Literal for literal in get_args(choice)]
    near = nearest(value, [text for text in literals if isinstance(text, str)]) if isinstance(value, str) else None
    raise ValueError(f"must be {allowed(hint)}" + (f'; did you mean "{near}"?' if near else ""))


def shown(value: object) -> str:
    """Returns `value` as it would stand in TOML, shortened to one line."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def allowed(hint: Any) -> str:
    """Describes the values that the type `hint` takes, to follow "must be"."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        meta: Meta = args[1]
        named = [("at least", meta.ge), ("more than", meta.gt), ("at most", meta.le), ("under", meta.lt)]
        limits = " and ".join(f"{word} {limit}" for word, limit in named if limit is not None)
        return meta.description or f"{allowed(args[0])}, {limits}"
    if origin in UNIONS:
        return ", or ".join(map(allowed, _choices(hint)))
    if origin is Literal:
        return any_of(args)
    if origin is tuple and get_origin(args[0]) is Literal:
        return f"a list of {any_of(get_args(args[0]))}"
    if origin is tuple and args[-1] is Ellipsis:
        return 'a list of texts, like ["one", "two"]'
    if origin is tuple:
        return f"a list of {len(args)} values, each {allowed(args[0])}"
    if origin is Mapping:
        return 'a table, like {name = "value"}'
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(hint, "text in quotes")


def any_of(literals: Iterable[object]) -> str:
    """Returns `"sft", "dpo" or "kto"`."""
    *first, last = map(json.dumps, literals)
    return f"{', '.join(first)} or {last}" if first else last


def _fits_json(value: object) -> bool:
    """Returns True when config.json can hold `value`: TOML has dates, infinity and nan beside that."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _choices(hint: Any) -> tuple[Any, ...]:
    """Returns the types that a union allows, without None, which TOML cannot say; another type alone."""
    types_of_union = get_args(hint) if get_origin(hint) in UNIONS else (hint,)
    return tuple(choice for choice in types_of_union if choice is not types.NoneType)
