"""The self-check as text for a person, with the machine's row for docs/hardware.md as the line to send."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

Found = Mapping[str, Any]

GB = 1e9
NO_GPU = "not compared, as MLX has no GPU here"
SEND = (
    "Please send the next line: paste it into an issue of the project, titled selfcheck. It becomes a row of the table "
    "in docs/hardware.md and holds no names or paths."
)


def lines(found: Found) -> Iterator[str]:
    """Yields the measurements as lines; the line to send and the faults come last, where they are seen."""
    for section in (_machine, _bits, _same, _devices, _numbers, _comparisons, _cross_entropy, _compiled, _seconds):
        yield from section(found)
    yield ""
    yield SEND
    yield ""
    yield row(found)
    yield ""
    yield from (f"DOES NOT HOLD: {fault}" for fault in found["faults"])
    if not found["faults"]:
        yield "everything that a run relies on holds here"


def row(found: Found) -> str:
    """Returns the machine's row of the table in docs/hardware.md, in one line."""
    return f"| {' | '.join(cell(found) for cell in COLUMNS.values())} |"


def header() -> str:
    """Returns the header of the table."""
    return f"| {' | '.join(COLUMNS)} |"


def chip(found: Found) -> str:
    """Returns mlx's name of the device."""
    return str(found["facts"].get("device_info", {}).get("device_name", found["machine"]))


def _machine(found: Found) -> Iterator[str]:
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


def _bits(found: Found) -> Iterator[str]:
    yield "gradient of a leaf, five times in each of two processes"
    for case, bits in found["bit_classes"].items():
        yield f"  {case:<7}{bits if ' ' in bits or bits == 'error' else f'same bits, class {bits}'}"


def _same(found: Found) -> Iterator[str]:
    yield "the same gradient in two ways, relative distance"
    yield f"  in segments, on the whole graph   {_largest(found['segments'])}"
    packed = {name: value["distance"] for name, value in found["packed"].items() if "distance" in value}
    yield f"  packed, each row alone            {_largest(packed)}"
    yield f"  in chunks, token by token         {_number(found['chunked'], 'distance', '.1e')}"


def _devices(found: Found) -> Iterator[str]:
    yield f"  on the GPU, on the CPU            {_on_devices(found)}"
    for case, distance in found["devices"].get("distances", {}).items():
        yield f"    {case:<8}{distance:.1e}" if isinstance(distance, float) else f"    {case:<8}error"


def _numbers(found: Found) -> Iterator[str]:
    errors = f"error {_error(found['gemm'])} as workers compute, {_error(found['gemm_default'])} by default"
    yield f"float32 product: {errors}, {_number(found['gemm'], 'gflops', '.0f')} GFLOP/s"
    seconds = _number(found["heartbeats"], "evaluation_seconds", ".1f")
    beside, within = found["heartbeats_other_process_gap"], _number(found["heartbeats"], "longest_gap_seconds", ".2f")
    gaps = f"longest gap {beside:.2f} s beside it, {within} s in its process"
    yield f"heartbeats during an evaluation of {seconds} s: {gaps}"
    for name, value in found["speed"].items():
        if isinstance(value, dict):
            speed, peak = value["tokens_per_second"], value["peak_bytes"] / 1e6
            yield f"training a small llama, {name}: {speed:.0f} tokens/s, {peak:.0f} MB above the model"


def _comparisons(found: Found) -> Iterator[str]:
    yield "times as fast, both measured in turns (in brackets the memory, relative to the other)"
    packed = found["packed"]
    yield f"  a training step, beside mlx-lm's trainer           {_ratio(found['mlx_lm'])}"
    yield f"  short rows packed, beside each row alone           {_ratio(packed.get('rows', {}))}"
    yield f"  pairs packed, beside each row alone                {_ratio(packed.get('pairs', {}))}"
    yield f"  a hybrid model in chunks, beside token by token    {_ratio(found['chunked'])}"
    if "reason" in found["chunked"]:
        yield f"    {found['chunked']['reason']}"


def _cross_entropy(found: Found) -> Iterator[str]:
    yield "mx.fast.cross_entropy, which mlxdist does not use, beside the log-probs of its head"
    each = found["cross_entropy"]
    if "absent" in each or "error" in each:
        yield f"  {each.get('absent', '?')}"
    for kind, value in each.items():
        if isinstance(value, dict):
            ours, fused = value["errors"].values()
            each_error = (f"{what} {fused[what]:.1e} ({ours[what]:.1e})" for what in ("loss", "gradient"))
            yield f"  {kind:<9}{_ratio(value)} times as fast, errors (of ours): {', '.join(each_error)}"


def _compiled(found: Found) -> Iterator[str]:
    yield "a leaf's gradient by mx.compile, which mlxdist does not use, beside a graph built each time"
    each = found["compiled"]
    if "times_as_fast" not in each:
        yield f"  {each.get('reason', '?')}"
        return
    bits = "same bits" if each["same_bits"] else f"off by {each['distance']:.1e}"
    built, made = 1e3 * each["building_seconds"], each["compiling_seconds"]
    yield f"  {_ratio(each)} times as fast, {bits}; {built:.0f} ms to build, {made:.1f} s to compile"


def _seconds(found: Found) -> Iterator[str]:
    each = (f"{key.replace('_', ' ')} {seconds:.0f}" for key, seconds in found["part_seconds"].items())
    yield f"seconds: {', '.join(each)}"


def _on_devices(found: Found) -> str:
    """The largest distance of the cases in float32, which alone can be small."""
    distances = found["devices"].get("distances", {})
    if not distances:
        return "?" if "error" in found["devices"] else NO_GPU
    return _largest({case: value for case, value in distances.items() if case != "bf16"})


def _bit_class(case: str, found: Found) -> str:
    return str(found["bit_classes"].get(case, "?"))


def _tokens_per_second(found: Found) -> str:
    return ", ".join(
        _number(found["speed"].get(name, {}), "tokens_per_second", ".0f") for name in ("whole", "segment 1")
    )


def _packed(found: Found) -> str:
    return ", ".join(_number(found["packed"].get(name, {}), "times_as_fast", ".2f") for name in ("rows", "pairs"))


def _fused(found: Found) -> str:
    each = found["cross_entropy"]
    return ", ".join(_number(each.get(kind, {}), "times_as_fast", ".2f") for kind in ("float32", "bfloat16"))


def _made_once(found: Found) -> str:
    each = found["compiled"]
    bits = {True: "same bits", False: "other bits"}.get(each.get("same_bits", ""), "?")
    return f"{_number(each, 'times_as_fast', '.2f')}, {bits}, {_number(each, 'compiling_seconds', '.1f')} s"


def _ratio(compared: Mapping[str, Any]) -> str:
    if "times_as_fast" not in compared:
        return "?"
    return f"{compared['times_as_fast']:.2f} ({compared['share_of_memory']:.2f})"


def _error(gemm: Mapping[str, Any]) -> str:
    return _number(gemm, "relative_error", ".1e")


def _number(values: Mapping[str, Any], key: str, form: str) -> str:
    return format(values[key], form) if key in values else "?"


def _largest(distances: Mapping[str, Any]) -> str:
    numbers = [value for value in distances.values() if isinstance(value, float)]
    if not numbers:
        return "?"
    return "equal bits" if max(numbers) == 0 else f"{max(numbers):.1e}"


COLUMNS: Mapping[str, Callable[[Found], str]] = MappingProxyType(
    {
        "chip": chip,
        "system": lambda found: found["system"],
        "mlxdist": lambda found: found["mlxdist"],
        "mlx": lambda found: found["facts"].get("versions", {}).get("mlx", "?"),
        "memory GB": lambda found: f"{found['memory_bytes'] / GB:.0f}",
        **{case: partial(_bit_class, case) for case in ("dense", "packed", "MoE", "4-bit", "bf16")},
        "fp32 error (default)": lambda found: f"{_error(found['gemm'])} ({_error(found['gemm_default'])})",
        "GFLOP/s": lambda found: _number(found["gemm"], "gflops", ".0f"),
        "segments": lambda found: _largest(found["segments"]),
        "GPU, CPU": lambda found: "no GPU" if _on_devices(found) == NO_GPU else _on_devices(found),
        "heartbeat gap s": lambda found: f"{found['heartbeats_other_process_gap']:.2f}",
        "tokens/s whole, segment 1": _tokens_per_second,
        "beside mlx-lm": lambda found: _number(found["mlx_lm"], "times_as_fast", ".2f"),
        "packed rows, pairs": _packed,
        "in chunks": lambda found: _number(found["chunked"], "times_as_fast", ".2f"),
        "cross_entropy fp32, bf16": _fused,
        "mx.compile": _made_once,
    }
)
