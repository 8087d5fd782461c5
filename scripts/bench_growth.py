"""Finds what grows faster than linearly with the tokens of a row, the rows of a batch, or the leaves of a step.

    python -m scripts.bench_growth                       # 64 to 8,192 tokens, rows and leaves; about ten minutes
    python -m scripts.bench_growth --only encoding       # the works with this in their names
    python -m scripts.bench_growth --least 64 --most 256 # short

Of every work at every size: the least processor time of several runs, and the peak of memory in another run (MLX's for
gradients, Python's for the rest). The exponent of both is that of a power law between the sizes of the upper half,
where costs that do not grow matter little. Attention grows with the square of a row, and nothing else may: the gradient
of one row is measured a second time with a sum in the place of attention. Prints JSON, with the works whose exponent is
above the limit under "faster_than_linear".
"""

import argparse
import gc
import json
import math
import os
import sys
import time
import tracemalloc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlxdist.node.work.blas import use_openblas
from scripts.machine import this_machine, versions

if TYPE_CHECKING:
    from scripts.bench_growth_leaves import Run, Work

THREADS = "1"  # as in a node on Linux
MOST_RUNS = 30  # of one size
TIME_SLACK, MEMORY_SLACK = 0.2, 0.1  # of an exponent above the allowed one; a sort has 1.1, and times vary


def main() -> None:
    """Measures, and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--least", type=int, default=64, help="smallest size")
    parser.add_argument("--most", type=int, default=8192, help="largest size; each is twice the one before")
    parser.add_argument("--only", default="", help="only works with this in their names")
    parser.add_argument("--seconds", type=float, default=1.0, help="of the runs of one size; at least one counts")
    parser.add_argument("--model", help="a folder whose tokenizer encodes; by default a tiny one is made")
    given = parser.parse_args()
    # OpenBLAS reads this when it is loaded, which must be before mlx is imported.
    os.environ.update(OPENBLAS_NUM_THREADS=THREADS, OMP_NUM_THREADS=THREADS, MLX_ENABLE_TF32="0", HF_HUB_OFFLINE="1")
    openblas = use_openblas()
    from mlxdist.coordinator.encode.tokenizer import hub_tokenizer, load
    from scripts.bench_growth_leaves import node_works
    from scripts.bench_growth_rows import coordinator_works, tiny_tokenizer

    sizes = [given.least << place for place in range((given.most // given.least).bit_length())]
    tokenizer = hub_tokenizer(load(given.model)) if given.model else tiny_tokenizer()
    found: dict[str, Any] = {}
    for works, on_device in ((node_works(), True), (coordinator_works(tokenizer), False)):
        for name, work in works.items():
            if given.only in name:
                print(name, file=sys.stderr, flush=True)
                found[name] = growth(work, sizes, on_device, given.seconds)
    result = {
        "works": found,
        "faster_than_linear": [name for name, each in found.items() if each["faster_than_linear"]],
        "machine": {**this_machine(THREADS, openblas), "load": os.getloadavg()},
        "versions": versions(),
    }
    print(json.dumps(result, indent=2))


def growth(work: "Work", sizes: Sequence[int], on_device: bool, seconds: float) -> dict[str, Any]:
    """Measures a work at every size. Returns seconds, MB, their exponents, and which of these are above the limit."""
    rows = [measured(work.prepare(size), on_device, seconds) for size in sizes]
    found: dict[str, Any] = {"unit": work.unit, "sizes": list(sizes)}
    for place, name in enumerate(("processor_seconds", "peak_mb", "clock_seconds")):
        found[name] = [round(row[place], 6) for row in rows]
    for kind, name in (("time", "processor_seconds"), ("memory", "peak_mb")):
        found[f"exponent_of_{kind}"] = exponent(sizes, found[name])
    found["faster_than_linear"] = [
        name
        for name, slack in (("time", TIME_SLACK), ("memory", MEMORY_SLACK))
        if (power := found[f"exponent_of_{name}"]) is not None and power > work.power + slack
    ]
    return found


def measured(run: "Run", on_device: bool, seconds: float) -> tuple[float, float, float]:
    """Returns the processor seconds of the fastest run, the peak of memory in MB, and the clock seconds."""
    import mlx.core as mx

    gc.collect()
    mx.clear_cache()
    if on_device:
        mx.reset_peak_memory()
        held = mx.get_active_memory()
        run()
        peak = mx.get_peak_memory() - held
    else:
        run()  # what is made once, such as a cache, is not of this run
        tracemalloc.start()
        result = run()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        del result
    processor, clock = [], []
    until = time.perf_counter() + seconds
    while not clock or (time.perf_counter() < until and len(clock) < MOST_RUNS):
        before, began = time.process_time(), time.perf_counter()
        run()
        processor.append(time.process_time() - before)
        clock.append(time.perf_counter() - began)
    return min(processor), peak / 1e6, min(clock)


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float | None:
    """Returns p of the power law c * size ** p nearest to the upper half; None where a value there is not above 0."""
    half = len(sizes) // 2
    if min(values[half:]) <= 0 or len(sizes) - half < 2:
        return None
    points = [(math.log(size), math.log(value)) for size, value in zip(sizes[half:], values[half:], strict=True)]
    mean_x, mean_y = (sum(each) / len(points) for each in zip(*points, strict=True))
    return round(sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points), 2)


if __name__ == "__main__":
    main()
