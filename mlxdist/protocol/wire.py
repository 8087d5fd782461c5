"""Turns messages into frames and back; no socket.

A message is three frames: a preamble (magic, version, payload size), a msgpack header, and the payload (may be empty).
Anything else is a WireError: nothing is guessed, no extension types, no pickle.
"""

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec

from mlxdist.protocol.errors import WireError
from mlxdist.protocol.limits import LINE_CHARS, MOST_LINES, SENTENCE_CHARS
from mlxdist.protocol.messages import PROTOCOL_VERSION, AnyMessage, Message
from mlxdist.protocol.untrusted import quoted

MAGIC = b"mlxd"
PREAMBLE = struct.Struct("<4sHHQ")  # magic, protocol version, reserved, payload bytes
MAX_HEADER = 4 << 20
MAX_PAYLOAD = 64 << 20

Buffer = bytes | bytearray | memoryview
Frames = Sequence[Buffer]


@cache
def _decoder() -> "msgspec.msgpack.Decoder[Any]":
    return msgspec.msgpack.Decoder(AnyMessage, strict=True, ext_hook=_no_extensions)


def _no_extensions(code: int, data: memoryview) -> object:
    raise WireError(f"extension type {code} in a header")


def encode(message: Message, payload: Buffer = b"") -> list[Buffer]:
    """The three frames of a message. Raises WireError for a header or payload over the limits."""
    header = msgspec.msgpack.encode(message)
    size = memoryview(payload).nbytes
    if len(header) > MAX_HEADER or size > MAX_PAYLOAD:
        raise WireError(f"{type(message).__name__} is too large: header {len(header)}, payload {size} bytes")
    return [PREAMBLE.pack(MAGIC, PROTOCOL_VERSION, 0, size), header, payload]


def fitted(message: Message) -> Message:
    """The message with its sentences and lines cut to what the other side takes."""
    changes: dict[str, Any] = {}
    for name in ("cause", "message", "reason", "what"):
        text = getattr(message, name, "")
        if len(text) > SENTENCE_CHARS:
            changes[name] = text[: SENTENCE_CHARS - 1] + "…"
    for name in ("tail", "lines"):
        lines = getattr(message, name, ())
        if len(lines) > MOST_LINES or any(len(line) > LINE_CHARS for line in lines):
            changes[name] = tuple(line[:LINE_CHARS] for line in lines[-MOST_LINES:])
    return msgspec.structs.replace(message, **changes) if changes else message


def decode(frames: Frames) -> tuple[Message, memoryview]:
    """The message and its payload. Raises WireError for frames that are no message."""
    if len(frames) != 3:
        raise WireError(f"{len(frames)} frames where a message has 3")
    preamble, header, payload = (memoryview(frame) for frame in frames)
    if preamble.nbytes != PREAMBLE.size:
        raise WireError(f"a preamble of {preamble.nbytes} bytes where {PREAMBLE.size} belong")
    magic, version, reserved, size = PREAMBLE.unpack(preamble)
    if magic != MAGIC or reserved != 0:
        raise WireError("not a message of mlxdist")
    if version != PROTOCOL_VERSION:
        raise WireError(
            f"protocol version {version}; this side speaks {PROTOCOL_VERSION}: install the same mlxdist on both"
        )
    if header.nbytes > MAX_HEADER or payload.nbytes > MAX_PAYLOAD:
        raise WireError(f"header of {header.nbytes} and payload of {payload.nbytes} bytes exceed the limits")
    if payload.nbytes != size:
        raise WireError(f"a payload of {payload.nbytes} bytes where the preamble announced {size}")
    try:
        message = _decoder().decode(header)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError(f"a header that is no message: {quoted(error)}") from error
    assert isinstance(message, Message)
    return message, payload
