"""Counts the operations of a call, which no load of the machine changes: bytecode instructions of the coordinator."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def operations(call: Callable[[], object], folder: str = "mlxdist/coordinator") -> int:
    """Returns how many bytecode instructions of files in `folder` run in a call."""
    found = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal found
        if event == "call":
            if folder not in frame.f_code.co_filename:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        found += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return found
