"""The self-check as text to paste, with the machine's row for docs/hardware.md."""

from collections.abc import Iterator, Mapping
from typing import Any

GB = 1e9
HEADER = (
    "| chip | system | mlxdist | mlx | memory GB | dense | padded | MoE | 4-bit | bf16 | fp32 error (default) | "
    "GFLOP/s | segments | heartbeat gap s | tokens/s whole, segment 1 |"
)


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields the measurements as lines; faults come last, where they are seen."""
    facts, info = found["facts"], found["facts"].get("device_info", {})
    versions = ", ".join(f"{name} {number}" for name, number in facts.get("versions", {}).items())
    yield f"mlxdist {found['mlxdist']} selfcheck, {found['seconds']:.0f} s"
    yield f"  {found['system']} {found['machine']}, Python {found['python']}, {versions}"
    blas = ", OpenBLAS" if facts.get("openblas") else ""
    yield f"  {chip(found)}, computing on {facts.get('device', '?')}{blas}"
    memory = f"{found['memory_bytes'] / GB:.1f} GB of memory, of which a node may use {found['usable_bytes'] / GB:.1f}"
    if recommended := info.get("max_recommended_working_set_size"):
        memory += f" (the system recommends {recommended / GB:.1f})"
    yield f"  {memory}"
    yield "gradient of a leaf, five times in each of two processes"
    for case, bits in found["bit_classes"].items():
        yield f"  {case:<7}{bits if ' ' in bits or bits == 'error' else f'same bits, class {bits}'}"
    peak = _number(found["gemm"], "gflops", ".0f")
    errors = f"{_error(found['gemm'])} as workers compute, {_error(found['gemm_default'])} by default"
    yield f"float32 product: error {errors}"
    yield f"  {peak} GFLOP/s"
    yield f"segmented against the whole graph: {_distances(found['segments'])}"
    seconds = _number(found["heartbeats"], "evaluation_seconds", ".1f")
    beside, within = found["heartbeats_other_process_gap"], _number(found["heartbeats"], "longest_gap_seconds", ".2f")
    gaps = f"longest gap {beside:.2f} s beside it, {within} s in its process"
    yield f"heartbeats during an evaluation of {seconds} s: {gaps}"
    for name, value in found["speed"].items():
        if isinstance(value, dict):
            speed, peak = value["tokens_per_second"], value["peak_bytes"] / 1e6
            yield f"training a small llama, {name}: {speed:.0f} tokens/s, {peak:.0f} MB above the model"
    yield ""
    yield HEADER
    yield row(found)
    yield ""
    yield from (f"DOES NOT HOLD: {fault}" for fault in found["faults"])
    if not found["faults"]:
        yield "everything that a run relies on holds here"


def row(found: Mapping[str, Any]) -> str:
    """Returns the machine's row of the table in docs/hardware.md."""
    speed = found["speed"]
    cells = [
        chip(found),
        found["system"],
        found["mlxdist"],
        found["facts"].get("versions", {}).get("mlx", "?"),
        f"{found['memory_bytes'] / GB:.0f}",
        *found["bit_classes"].values(),
        f"{_error(found['gemm'])} ({_error(found['gemm_default'])})",
        _number(found["gemm"], "gflops", ".0f"),
        _distances(found["segments"]),
        f"{found['heartbeats_other_process_gap']:.2f}",
        ", ".join(_number(speed.get(name, {}), "tokens_per_second", ".0f") for name in ("whole", "segment 1")),
    ]
    return f"| {' | '.join(cells)} |"


def chip(found: Mapping[str, Any]) -> str:
    """Returns mlx's name of the device."""
    return str(found["facts"].get("device_info", {}).get("device_name", found["machine"]))


def _error(gemm: Mapping[str, Any]) -> str:
    return _number(gemm, "relative_error", ".1e")


def _number(values: Mapping[str, Any], key: str, form: str) -> str:
    return format(values[key], form) if key in values else "?"


def _distances(segments: Mapping[str, Any]) -> str:
    distances = [value for value in segments.values() if isinstance(value, float)]
    largest = max(distances, default=float("nan"))
    return "equal bits" if largest == 0 else f"{largest:.1e}"
