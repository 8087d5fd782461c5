"""Messages of every type, made from the types themselves: one plain example of each, and Hypothesis strategies."""

import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from hypothesis import strategies as st

from mlxdist.protocol import messages as m
from mlxdist.protocol.messages import AnyMessage, Message

MESSAGE_TYPES: tuple[type[Message], ...] = get_args(AnyMessage)


def example(kind: Any) -> Any:
    """One plain value of a field's type, never the default one."""
    plain = {str: "örtlich", int: 7, float: 0.25, bool: True}
    if kind in plain:
        return plain[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(**{field.name: example(field.type) for field in msgspec.structs.fields(kind)})
    inner = get_args(kind)
    if get_origin(kind) is Literal:
        return inner[-1]
    if get_origin(kind) is Annotated:
        return example(inner[0])
    if get_origin(kind) is Literal:
        return inner[-1]
    if get_origin(kind) is tuple:
        return (example(inner[0]), example(inner[0]))
    if get_origin(kind) is dict:
        return {example(inner[0]): example(inner[1])}
    if get_origin(kind) in (Union, types.UnionType):
        return example(inner[0])
    raise TypeError(f"no example of {kind}")


def drawn(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    plain: dict[Any, st.SearchStrategy[Any]] = {
        str: st.text(max_size=12),
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
    }
    if kind in plain:
        return plain[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return st.builds(kind, **{field.name: drawn(field.type) for field in msgspec.structs.fields(kind)})
    inner = get_args(kind)
    if get_origin(kind) is Literal:
        return st.sampled_from(inner)
    if get_origin(kind) is Annotated:
        return limited(inner[0], inner[1])
    if get_origin(kind) is Literal:
        return st.sampled_from(inner)
    if get_origin(kind) is tuple:
        return st.lists(drawn(inner[0]), max_size=3).map(tuple)
    if get_origin(kind) is dict:
        return st.dictionaries(drawn(inner[0]), drawn(inner[1]), max_size=3)
    if get_origin(kind) in (Union, types.UnionType):
        return st.one_of(*(drawn(one) for one in inner))
    raise TypeError(f"no strategy for {kind}")


def limited(kind: Any, meta: msgspec.Meta) -> st.SearchStrategy[Any]:
    """Values of a type with limits, up to them where that is cheap."""
    if kind is int:
        lowest = 0 if meta.ge is None else int(meta.ge)
        return st.integers(lowest, int(meta.lt) - 1 if meta.lt is not None else 2**63 - 1)
    if kind is float:
        return st.floats(meta.ge, meta.le, allow_nan=False)
    return drawn(kind)


EXAMPLES: tuple[Message, ...] = tuple(example(kind) for kind in MESSAGE_TYPES)
ANY_MESSAGE: st.SearchStrategy[Message] = st.one_of(*(drawn(kind) for kind in MESSAGE_TYPES))


def all_message_classes(base: type[Message] = m.Message) -> Iterator[type[Message]]:
    """Every class that derives from Message, whether the union names it or not."""
    for kind in base.__subclasses__():
        yield kind
        yield from all_message_classes(kind)


def hints(kind: type[Message]) -> dict[str, Any]:
    """The fields of a message with their types."""
    return {name: hint for name, hint in typing.get_type_hints(kind).items() if name in kind.__struct_fields__}
