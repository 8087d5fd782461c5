"""`mlxdist selfcheck`: the bits and the speed of this machine, measured without a network or a downloaded model.

Each part runs in a process of its own, in a worker's environment. People send the result to the project, for the table
of Macs in docs/hardware.md.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import psutil

from mlxdist.node.work.blas import use_openblas
from mlxdist.protocol.budget import usable_bytes
from mlxdist.protocol.numerics import WORKER_ENVIRONMENT
from mlxdist.protocol.version import VERSION

PART_SECONDS = 120.0  # until a part counts as hanging
HEARTBEAT = 0.02  # seconds between two heartbeats of this process, while another one evaluates
GEMM_ERROR = 1e-5  # above it a float32 product was computed with fewer bits: TF32 gives 3e-4, float32 3e-7
SEGMENTS_ERROR = {"bf16": 2e-2}  # largest relative distance of two computations of a gradient
SEGMENTS_ERROR_ELSE = 1e-5


def selfcheck(*, as_json: bool) -> int:
    """Measures and prints. Returns 0, or 1 when something fails that a run relies on."""
    from mlxdist.node.selfcheck.view import lines

    found = measure(say=lambda part: print(f"measuring: {part}", file=sys.stderr))
    print(json.dumps(found, indent=2) if as_json else "\n".join(lines(found)))
    return 1 if found["faults"] else 0


def measure(say: Any) -> dict[str, Any]:
    """Returns all parts: {"facts": …, "bits": …, …, "faults": sentences}. `say` gets the name of each as it begins."""
    started = time.monotonic()
    memory = psutil.virtual_memory()
    found: dict[str, Any] = {
        "mlxdist": VERSION,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.mac_ver()[0] or platform.release().partition('-')[0]}",
        "machine": platform.machine(),
        "memory_bytes": memory.total,
        "usable_bytes": usable_bytes(memory.total, platform.system()),
    }
    for name in ("facts", "bits", "segments", "gemm", "speed"):
        say(name)
        found[name], _ = part(name)
    say("bits in a second process")
    found["bits_again"], _ = part("bits")
    say("gemm with mlx's own settings")
    found["gemm_default"], _ = part("gemm", {"MLX_ENABLE_TF32": None})
    say("heartbeats")
    found["heartbeats"], found["heartbeats_other_process_gap"] = part("heartbeats")
    found["seconds"] = round(time.monotonic() - started, 1)
    found["bit_classes"] = bit_classes(found["bits"], found["bits_again"])
    found["faults"] = faults(found)
    return found


def part(name: str, changes: Mapping[str, str | None] | None = None) -> tuple[dict[str, Any], float]:
    """Returns the result of one part, or {"error": …}, and the longest gap between heartbeats beside it, in seconds.

    `changes`: to a worker's environment; None removes a variable.
    """
    settings = {**os.environ, **WORKER_ENVIRONMENT, **(changes or {})}
    environment = {key: value for key, value in settings.items() if value is not None}
    command = [sys.executable, "-m", "mlxdist.node.selfcheck.selfcheck", name]
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
    for name in first:
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


def faults(found: Mapping[str, Any]) -> list[str]:
    """Returns sentences on what fails that a run relies on.

    Different bits are no fault: such a run promises a tolerance.
    """
    said = [
        f"{name}: {value['error']}" for name, value in found.items() if isinstance(value, dict) and "error" in value
    ]
    for name in ("bits", "segments"):
        cases = {} if "error" in found[name] else found[name]
        said += [f"{name}, {case}: {value['error']}" for case, value in cases.items() if isinstance(value, dict)]
    error = found["gemm"].get("relative_error", 0.0)
    if not error <= GEMM_ERROR:
        said.append(f"float32 products are off by {error:.1e} although MLX_ENABLE_TF32 is 0")
    for case, distance in found["segments"].items():
        limit = SEGMENTS_ERROR.get(case, SEGMENTS_ERROR_ELSE)
        if isinstance(distance, float) and not distance <= limit:
            said.append(f"{case}: the segmented gradient is off by {distance:.1e}, more than {limit:.0e}")
    return said


def main(name: str) -> None:
    """Measures one part in this process and prints its JSON."""
    blas = use_openblas()  # before mlx is imported
    from mlxdist.node.selfcheck.parts import PARTS

    found = PARTS[name]()
    print(json.dumps({**found, "openblas": blas} if name == "facts" else found))


if __name__ == "__main__":
    main(sys.argv[1])
