"""Safetensors files that a cut, a lost header or a wrong offset has made unreadable."""

import json
import struct
from collections.abc import Mapping
from types import MappingProxyType

ONE = {"dtype": "F32", "shape": [4]}


def file_of(header: object, data: bytes = b"\0" * 32, size: int | None = None) -> bytes:
    """A file with this header, said to have `size` bytes, and these tensors."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def header_of(first: tuple[int, int], second: tuple[int, int], **changes: object) -> dict[str, object]:
    """A header of two tensors of 16 bytes at these offsets; `changes` to the first one."""
    return {"a": {**ONE, "data_offsets": first, **changes}, "b": {**ONE, "data_offsets": second}}


WHOLE = file_of(header_of((0, 16), (16, 32)))
TORN: Mapping[str, bytes] = MappingProxyType(
    {
        "header longer than the file": file_of(header_of((0, 16), (16, 32)), size=10**6),
        "header of 2^63 bytes": file_of(header_of((0, 16), (16, 32)), size=2**63),
        "header that ends early": file_of(header_of((0, 16), (16, 32)), size=20),
        "tail cut": WHOLE[:-1],
        "a longer tail": WHOLE + b"\0",
        "offsets beyond the end": file_of(header_of((0, 16), (16, 320))),
        "offsets that overlap": file_of(header_of((0, 16), (0, 16))),
        "offsets with a gap": file_of(header_of((0, 16), (20, 36)), b"\0" * 36),
        "offsets reversed": file_of(header_of((16, 0), (16, 32))),
        "a shape that does not fit": file_of(header_of((0, 16), (16, 32), shape=[5])),
        "a shape that overflows": file_of(header_of((0, 16), (16, 32), shape=[2**62, 4])),
        "a type that does not exist": file_of(header_of((0, 16), (16, 32), dtype="F99")),
        "a list": file_of([]),
        "empty": b"",
        "zeros": b"\0" * 400,
        "a pointer of git-lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234\n",
    }
)
