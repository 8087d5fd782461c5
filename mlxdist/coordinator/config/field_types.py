"""What one configuration value may be: read from a field's type, checked, and said in words.

A field's annotation is the only place that knows its type and range:

    size: Annotated[int, Limits(low=1)] = 8        must be a whole number, at least 1
    schedule: Literal["constant", "linear"]        must be "constant" or "linear"
    save_every: Count | Literal["auto"]            must be a whole number, at least 1, or "auto"
"""

import difflib
import json
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

NoneType = type(None)
SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True)
class Limits:
    """A range of numbers. `also` lists single values allowed outside it."""

    low: float | None = None
    high: float | None = None
    above: float | None = None  # the value must be greater than this
    under: float | None = None  # the value must be less than this
    also: tuple[int, ...] = ()

    def allow(self, value: float) -> bool:
        """Whether `value` is inside."""
        if value in self.also:
            return True
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.under is None or value < self.under)
        )

    def words(self) -> str:
        """The range as a reader says it: "at least 0 and under 1"."""
        named = [("at least", self.low), ("more than", self.above), ("at most", self.high), ("under", self.under)]
        said = " and ".join(f"{word} {bound}" for word, bound in named if bound is not None)
        return " or ".join([said, *map(str, self.also)])


@dataclass(frozen=True)
class Filled:
    """A text that may not be empty."""

    def allow(self, value: str) -> bool:
        """Whether `value` says something."""
        return bool(value.strip())

    def words(self) -> str:
        """The rule, after the type."""
        return "not empty"


class UnfitError(ValueError):
    """A value that its field does not take. The caller says where, and what is allowed."""


def shown(value: object) -> str:
    """`value` as it would stand in TOML, shortened to one line."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def words(hint: Any) -> str:
    """What the type `hint` allows, to follow "must be"."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return ", ".join([words(args[0]), *(mark.words() for mark in args[1:])])
    if origin in (Union, types.UnionType):
        kinds = [words(arg) for arg in args if arg is not NoneType]
        return kinds[0] if len(kinds) == 1 else ", or ".join(kinds)
    if origin is Literal:
        return any_of(args)
    if origin is tuple and args[-1] is Ellipsis:
        return 'a list of texts, like ["one", "two"]'
    if origin is tuple:
        return f"a list of {len(args)} values, each {words(args[0])}"
    if origin is Mapping:
        return 'a table, like {name = "value"}'
    plain = {int: "a whole number", float: "a number", bool: "true or false"}
    return plain.get(hint, "text in quotes")


def any_of(choices: tuple[str, ...]) -> str:
    """Quoted `choices` joined by commas and a last "or"."""
    quoted = [f'"{choice}"' for choice in choices]
    return " or ".join([*([", ".join(quoted[:-1])] if quoted[1:] else []), quoted[-1]])


def meant(hint: Any, value: object) -> str:
    """A question naming the choice of `hint` that a misspelt `value` is nearest to, or ""."""
    choices = [choice for arg in (hint, *get_args(hint)) if get_origin(arg) is Literal for choice in get_args(arg)]
    near = difflib.get_close_matches(value.lower(), choices, n=1) if isinstance(value, str) else []
    return f'; did you mean "{near[0]}"?' if near else ""


def fit(hint: Any, value: object) -> Any:
    """`value` as the type `hint` holds it (lists become tuples, 1 becomes 1.0 where a number is asked for).

    Raises UnfitError when the type or the range is wrong. In TOML true is no number, "8" no 8, 8.0 not whole.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        fitted = fit(args[0], value)
        if not all(mark.allow(fitted) for mark in args[1:]):
            raise UnfitError
        return fitted
    if origin in (Union, types.UnionType):
        return _fit_union(args, value)
    if origin is Literal:
        if isinstance(value, str) and value in args:
            return value
        raise UnfitError
    if origin is tuple:
        return _fit_tuple(args, value)
    if origin is Mapping:
        return _fit_mapping(args[1], value)
    return _fit_plain(hint, value)


def _fit_union(args: tuple[Any, ...], value: object) -> Any:
    for arg in args:
        if arg is not NoneType:
            try:
                return fit(arg, value)
            except UnfitError:
                continue
    raise UnfitError


def _fit_tuple(args: tuple[Any, ...], value: object) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise UnfitError
    hints = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
    if len(hints) != len(value):
        raise UnfitError
    return tuple(fit(hint, item) for hint, item in zip(hints, value, strict=True))


def _fit_mapping(hint: Any, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UnfitError
    if hint is not object:
        return {key: fit(hint, item) for key, item in value.items()}
    try:  # a free value must survive config.json: no dates, no nan
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise UnfitError from None
    return dict(value)


def _fit_plain(hint: type, value: object) -> Any:
    if hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf:
            return float(value)
    elif hint is Path:
        if isinstance(value, str) and value.strip():
            return Path(value)
    elif type(value) is hint:  # exactly: bool is an int to isinstance
        return value
    raise UnfitError
