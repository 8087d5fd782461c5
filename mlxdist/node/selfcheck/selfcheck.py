"""`mlxdist selfcheck`: the bits and the speed of this machine, measured without a network or a downloaded model.

Each part runs in a process of its own, in a worker's environment. Where two ways are compared, they take turns in one
process. People send the last line to the project, for the table in docs/hardware.md.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from mlxdist.node.selfcheck.faults import faults
from mlxdist.node.work.blas import use_openblas
from mlxdist.protocol.budget import usable_bytes
from mlxdist.protocol.numerics import WORKER_ENVIRONMENT
from mlxdist.protocol.version import VERSION

PART_SECONDS = 120.0  # until a part counts as hanging
HEARTBEAT = 0.02  # seconds between two heartbeats of this process, while another one evaluates


@dataclass(frozen=True, slots=True)
class Measurement:
    """One part of the self-check: its key in the result, and the function of parts.py that measures it."""

    key: str
    part: str = ""  # "": of the same name
    changes: Mapping[str, str | None] = field(default_factory=dict)  # to a worker's environment; None removes


MEASUREMENTS = (
    Measurement("facts"),
    Measurement("bits"),
    Measurement("bits_again", "bits"),
    Measurement("segments"),
    Measurement("devices"),
    Measurement("gemm"),
    Measurement("gemm_default", "gemm", {"MLX_ENABLE_TF32": None}),
    Measurement("speed"),
    Measurement("mlx_lm"),
    Measurement("packed"),
    Measurement("chunked"),
    Measurement("cross_entropy"),
    Measurement("compiled"),
    Measurement("heartbeats"),
)


def selfcheck(*, as_json: bool) -> int:
    """Measures and prints. Returns 0, or 1 when something fails that a run relies on."""
    from mlxdist.node.selfcheck.view import lines

    found = measure(say=lambda line: print(line, file=sys.stderr))
    print(json.dumps(found, indent=2) if as_json else "\n".join(lines(found)))
    return 1 if found["faults"] else 0


def measure(say: Callable[[str], None], share: float = 1.0) -> dict[str, Any]:
    """Returns all parts: {"facts": …, "bits": …, …, "faults": sentences}.

    Args:
        say: gets a line as each part begins.
        share: of the usual seconds of each part; 0 for the fewest rounds.
    """
    started = time.monotonic()
    memory = psutil.virtual_memory()
    found: dict[str, Any] = {
        "mlxdist": VERSION,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.mac_ver()[0] or platform.release().partition('-')[0]}",
        "machine": platform.machine(),
        "memory_bytes": memory.total,
        "usable_bytes": usable_bytes(memory.total, platform.system()),
        "part_seconds": {},
    }
    for number, each in enumerate(MEASUREMENTS, 1):
        say(f"measuring {number} of {len(MEASUREMENTS)}: {each.key.replace('_', ' ')}")
        began = time.monotonic()
        found[each.key], gap = part(each.part or each.key, each.changes, share)
        found["part_seconds"][each.key] = round(time.monotonic() - began, 1)
        if each.key == "heartbeats":
            found["heartbeats_other_process_gap"] = gap
    found["seconds"] = round(time.monotonic() - started, 1)
    found["bit_classes"] = bit_classes(found["bits"], found["bits_again"])
    found["faults"] = faults(found)
    return found


def part(
    name: str, changes: Mapping[str, str | None] | None = None, share: float = 1.0
) -> tuple[dict[str, Any], float]:
    """Returns the result of one part, or {"error": …}, and the longest gap between heartbeats beside it, in seconds.

    `changes`: to a worker's environment; None removes a variable. `share`: see `measure`.
    """
    settings = {**os.environ, **WORKER_ENVIRONMENT, **(changes or {})}
    environment = {key: value for key, value in settings.items() if value is not None}
    command = [sys.executable, "-m", "mlxdist.node.selfcheck.selfcheck", name, str(share)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        started = before = time.monotonic()
        longest = 0.0
        while process.poll() is None:  # no part prints more than a pipe holds
            time.sleep(HEARTBEAT)
            now = time.monotonic()
            longest, before = max(longest, now - before), now
            if now - started > PART_SECONDS:
                process.kill()
                return {"error": f"no answer after {PART_SECONDS:.0f} s"}, longest
        out, err = process.communicate()
    if process.returncode:
        last = err.strip().splitlines()[-1:] or [""]
        return {"error": f"ended with {process.returncode}: {last[0][:200]}"}, longest
    result: dict[str, Any] = json.loads(out)
    return result, longest


def bit_classes(first: Mapping[str, Any], again: Mapping[str, Any]) -> dict[str, str]:
    """Returns per case the first eight digits of its digest if all ten agree, otherwise how many differ."""
    classes = {}
    for name in (case for case in first if case != "error"):
        one, two = first[name], again.get(name)
        if not isinstance(one, list) or not isinstance(two, list):
            classes[name] = "error"
        elif len(set(one)) == 1 and one == two:
            classes[name] = one[0][:8]
        elif len(set(one)) == len(set(two)) == 1:
            classes[name] = "differs between processes"
        else:
            classes[name] = f"{len(set(one + two))} answers in {len(one + two)}"
    return classes


def main(name: str, share: float) -> None:
    """Measures one part in this process and prints its JSON."""
    blas = use_openblas()  # before mlx is imported
    from mlxdist.node.selfcheck.parts import PARTS

    found = PARTS[name].run(share)
    print(json.dumps({**found, "openblas": blas} if name == "facts" else found))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
