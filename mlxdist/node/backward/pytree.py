"""Arguments and results of a layer call, taken apart into arrays and the structure around them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class UnsupportedError(Exception):
    """The layers of a model work in a way that the hooks cannot follow; the caller takes another path."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one array: its number in the list of arrays."""

    index: int


def take_apart(value: Any, arrays: list[mx.array]) -> Any:
    """Returns `value` with a `Slot` for every array and appends the arrays to `arrays`. Walks tuples, lists and dicts.

    Raises `UnsupportedError` for any other container, as it could not be put together again.
    """
    if isinstance(value, mx.array):
        arrays.append(value)
        return Slot(len(arrays) - 1)
    if value is None or isinstance(value, (str, int, float, bool, mx.Dtype, nn.Module)):
        return value
    if type(value) in (tuple, list):
        return type(value)(take_apart(item, arrays) for item in value)
    if type(value) is dict:
        return {key: take_apart(item, arrays) for key, item in value.items()}
    raise UnsupportedError(f"a layer returns a {type(value).__name__}")


def put_together(structure: Any, arrays: Any) -> Any:
    """Returns the value that `take_apart` made `structure` from, with `arrays[index]` in each slot."""
    if isinstance(structure, Slot):
        return arrays[structure.index]
    if type(structure) in (tuple, list):
        return type(structure)(put_together(item, arrays) for item in structure)
    if type(structure) is dict:
        return {key: put_together(item, arrays) for key, item in structure.items()}
    return structure


def arrays_in(value: Any) -> Iterator[mx.array]:
    """Yields every array in the tuples, lists and dicts of `value`, in order."""
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from arrays_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from arrays_in(item)


def fresh(array: mx.array) -> mx.array:
    """Returns another handle of the same array: model code may write into its own in place (gemma3n does)."""
    return array.reshape(array.shape)
