"""The machine and the versions that a benchmark's figures hold for."""

import os
import platform
from importlib.metadata import version
from typing import Any


def this_machine(threads: str, openblas: bool) -> dict[str, Any]:
    """Returns the machine as JSON; `threads` and `openblas` are those of the processes that were measured."""
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "openblas": openblas,
    }


def versions() -> dict[str, str]:
    """Returns the versions of mlxdist, mlx and mlx-lm."""
    return {name: version(name) for name in ("mlxdist", "mlx", "mlx-lm")}
