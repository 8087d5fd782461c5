"""One node's part of `mlxdist doctor`: its versions, memory and GPU, and the link to the coordinator by our own wire.

It reads two lines of JSON from standard input: its keys, and the coordinator's `host` ("" = the address by which ssh
came in) and `ports`. It prints one line of JSON. Nothing is written.
"""

import json
import os
import platform
import sys
from collections.abc import Mapping
from typing import Any

import psutil

from mlxdist.keys.pair import keys_of_line
from mlxdist.protocol.versions import versions


def facts() -> dict[str, Any]:
    """Returns the facts on this machine that a run depends on. Sizes are in bytes."""
    memory = psutil.virtual_memory()
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "versions": versions(),
        "memory": memory.total,
        "available": memory.available,
        "metal": _metal(),
    }


def coordinator_host(given: str, environ: Mapping[str, str]) -> str:
    """Returns the address to dial: the given one, or the one from which ssh reached this machine."""
    return given or environ.get("SSH_CONNECTION", "127.0.0.1").split(" ")[0]


def _metal() -> str:
    """Returns "yes", "no", or the reason for which mlx cannot say."""
    try:
        import mlx.core as mx

        return "yes" if mx.metal.is_available() else "no"
    except Exception as error:  # told to the coordinator, which shows it
        return str(error) or type(error).__name__


def main() -> None:
    """Answers one order."""
    from mlxdist.node.link.measure import measure

    keys, order = keys_of_line(sys.stdin.buffer.readline()), json.loads(sys.stdin.buffer.readline())
    link = measure(coordinator_host(order["host"], os.environ), order["ports"], keys)
    print(json.dumps({**facts(), "link": link}))


if __name__ == "__main__":
    main()
