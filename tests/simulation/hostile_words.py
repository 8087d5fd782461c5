"""Frames that a hostile peer may send: messages of the real types with values that are plausible, extreme or wrong."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from mlxdist.protocol import messages as m
from mlxdist.protocol.vectors import BLOCK_BYTES
from mlxdist.protocol.wire import MAGIC, PREAMBLE, Frames, encode
from tests.protocol.example_messages import MESSAGE_TYPES

NUMBERS = (-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 7, 12, 255, 2**16, 2**31 - 1, 2**31, 2**40, 2**63 - 1, 2**64 - 1)
FLOATS = (float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 1e-300, 0.5, 1e9, 1e300, -1e300)
TEXTS = (
    "",
    "a",
    "evil",
    "partial",
    "adapter",
    "reference",
    "gradient",
    "score",
    "nonfinite",
    "config",
    "error",
    "../x",
)
STRANGE = ("\x1b[2J\nforged", "\u202e", "x" * 64, "x" * 129, "x" * 9000, "\x00", "é" * 300)
PAYLOADS = (0, 1, 3, 4, 5, 40, 60, 64, 4096, BLOCK_BYTES, BLOCK_BYTES + 1)


@dataclass
class Words:
    """Draws frames. `known` holds values of the conversation by the name of the field, which make a message plausible.

    `heard` are frames of others, which may be said again.
    """

    rng: random.Random
    known: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    heard: Sequence[Frames] = ()

    def frames(self, kinds: Sequence[type[m.Message]] = MESSAGE_TYPES) -> Frames:
        """Returns one message of these types, more or less."""
        chance = self.rng.random()
        if self.heard and chance < 0.15:
            return self.damaged(self.rng.choice(self.heard)) if chance < 0.05 else self.rng.choice(self.heard)
        if chance < 0.2:
            return self.damaged(encode(m.Leave(m.SessionId("run", 1, "1"))))
        kind = self.rng.choice(kinds)
        fields = {one.name: self.value(one.name, one.type) for one in msgspec.structs.fields(kind)}
        for _ in range(self.rng.choice((0, 0, 0, 1, 1, 2))):
            self._spoil(fields)
        return _unchecked({"type": kind.__name__, **fields}, self.payload())

    def payload(self) -> bytes:
        """Returns a payload of some size."""
        size = self.rng.choice(PAYLOADS if self.rng.random() < 0.1 else PAYLOADS[:9])
        return self.rng.randbytes(size) if size <= 4096 else bytes(size)

    def value(self, name: str, kind: Any) -> Any:
        """Returns a value for a field: one that is known, or one of its type."""
        if self.known.get(name) and self.rng.random() < 0.85:
            return self.rng.choice(self.known[name])
        return self._of(kind)

    def _of(self, kind: Any) -> Any:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            values = {one.name: self.value(one.name, one.type) for one in msgspec.structs.fields(kind)}
            return list(values.values()) if kind.__struct_config__.array_like else values
        inner = get_args(kind)
        origin = get_origin(kind)
        if origin is Literal:
            return self.rng.choice(inner)
        if origin is Annotated:
            return self._of(inner[0])
        if origin is Literal:
            return self.rng.choice((*inner, *TEXTS))
        if origin is tuple:
            return [self._of(inner[0]) for _ in range(self.rng.choice((0, 1, 1, 2, 3, 9)))]
        if origin is dict:
            return {self._of(inner[0]): self._of(inner[1]) for _ in range(self.rng.randrange(4))}
        if origin in (Union, UnionType):
            return self._of(self.rng.choice(inner))
        if kind is str and self.rng.random() < 0.1:
            return self.rng.choice(STRANGE)
        plain = {int: range(9), float: (0.0, 0.25, 2.0), bool: (True, False), str: TEXTS}
        return self.rng.choice(plain[kind])

    def _spoil(self, fields: dict[str, Any]) -> None:
        """Changes one field to something extreme or of another type, removes it, or adds one."""
        name = self.rng.choice([*fields, "more"])
        values = (NUMBERS, FLOATS, TEXTS, STRANGE, ([], {}, None, True, b"x", [[[]]] * 50, ["x"] * 2000))
        if self.rng.random() < 0.1:
            fields.pop(name, None)
        else:
            fields[name] = self.rng.choice(self.rng.choice(values))

    def damaged(self, frames: Frames) -> Frames:
        """Returns frames with some bytes changed, cut off, doubled or moved."""
        damaged = [bytearray(frame) for frame in frames]
        for _ in range(self.rng.choice((1, 1, 2, 5))):
            frame = self.rng.choice(damaged) if damaged else bytearray()
            match self.rng.randrange(6):
                case 0 | 1 if frame:
                    frame[self.rng.randrange(len(frame))] = self.rng.randrange(256)
                case 2 if frame:
                    del frame[self.rng.randrange(len(frame)) :]
                case 3:
                    frame += self.rng.randbytes(self.rng.randrange(20))
                case 4:
                    damaged.insert(self.rng.randrange(len(damaged) + 1), bytearray(self.rng.randbytes(3)))
                case _ if damaged:
                    damaged.pop(self.rng.randrange(len(damaged)))
        return damaged


def _unchecked(fields: Mapping[str, Any], payload: bytes) -> Frames:
    """Returns the frames of a message with these fields, whatever they are."""
    try:
        header = msgspec.msgpack.encode(fields)
    except (OverflowError, UnicodeEncodeError):  # not even msgpack can say that
        header = b"\xc1"
    return [PREAMBLE.pack(MAGIC, m.PROTOCOL_VERSION, 0, len(payload)), header, payload]
