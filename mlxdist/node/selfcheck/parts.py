"""The measurements of the self-check. Each runs in a process of its own: a crash in one is a result and ends no other.

python -m mlxdist.node.selfcheck.selfcheck bits 1      # prints one JSON object
"""

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np

from mlxdist.node.backward.backward import GradientPath
from mlxdist.node.backward.comparison import distance, in_short
from mlxdist.node.selfcheck import models
from mlxdist.node.selfcheck.compiled import compiled
from mlxdist.node.selfcheck.cross_entropy import cross_entropy
from mlxdist.node.selfcheck.devices import on_both_devices
from mlxdist.node.selfcheck.forms import chunked, packed_rows
from mlxdist.node.selfcheck.gradients import TOGETHER, leaf_gradient
from mlxdist.node.selfcheck.training import beside_mlx_lm, speed
from mlxdist.node.work.objective import passes

TIMES = 5  # that each leaf's gradient is computed
GEMM_SIZE = 1024
EXACT_SIZE = 256  # of the product that is compared with float64
HEARTBEAT = 0.02  # seconds between two heartbeats


def facts() -> dict[str, Any]:
    """Returns versions, the device, and mlx's limits."""
    versions = {}
    for name in ("mlx", "mlx-lm", "mlx-metal", "mlx-cpu"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    device = {key: value for key, value in mx.device_info().items() if isinstance(value, str | int)}
    return {
        "versions": versions,
        "device": str(mx.default_device()),
        "device_info": device,
        "memory_limit": mx.set_memory_limit(0),  # not restored, as this process ends
        "cache_limit": mx.set_cache_limit(0),
    }


def bits() -> dict[str, Any]:
    """Returns the SHA-256 of each case's gradient and row sums, computed five times."""
    return {name: _or_error(partial(_digests, case)) for name, case in models.CASES.items()}


def gemm(seconds: float) -> dict[str, Any]:
    """Returns the error of a float32 matrix product against float64, and the GFLOP/s of a large one."""
    random = np.random.default_rng(0)
    left, right = (random.standard_normal((EXACT_SIZE, EXACT_SIZE)).astype(np.float32) for _ in range(2))
    exact = left.astype(np.float64) @ right.astype(np.float64)
    got = np.array(mx.array(left) @ mx.array(right), np.float64)
    large = mx.array(random.standard_normal((GEMM_SIZE, GEMM_SIZE)).astype(np.float32))
    fastest = _fastest(lambda: mx.eval(large @ large), seconds)
    error = float(np.linalg.norm(got - exact) / np.linalg.norm(exact))
    return {"relative_error": error, "gflops": 2 * GEMM_SIZE**3 / fastest / 1e9}


def segments() -> dict[str, Any]:
    """Returns each case's distance between the segmented and the whole graph's gradient, relative to the latter."""
    return {name: _or_error(partial(_distance, case)) for name, case in models.CASES.items()}


def heartbeats(seconds: float) -> dict[str, Any]:
    """Returns the longest gap between two heartbeats of a thread beside an evaluation of about `seconds`."""
    gaps = [0.0]
    done = threading.Event()

    def heartbeat() -> None:
        before = time.monotonic()
        while not done.is_set():
            time.sleep(HEARTBEAT)
            now = time.monotonic()
            gaps[0] = max(gaps[0], now - before)
            before = now

    square = mx.ones((GEMM_SIZE, GEMM_SIZE)) / GEMM_SIZE
    a_product = _fastest(lambda: mx.eval(square @ square), 0.5)
    thread = threading.Thread(target=heartbeat)
    thread.start()
    started, out = time.monotonic(), square
    for _ in range(max(int(seconds / a_product), 1)):
        out = out @ square
    mx.eval(out)
    took = time.monotonic() - started
    done.set()
    thread.join()
    return {"evaluation_seconds": took, "longest_gap_seconds": gaps[0]}


@dataclass(frozen=True, slots=True)
class Part:
    """A measurement that returns a JSON object, and the seconds that it is given; None: it takes what it takes."""

    measure: Callable[..., dict[str, Any]]
    seconds: float | None = None

    def run(self, share: float) -> dict[str, Any]:
        """Measures, in so much of the usual seconds."""
        return self.measure() if self.seconds is None else self.measure(seconds=self.seconds * share)


PARTS: Mapping[str, Part] = MappingProxyType(
    {
        "facts": Part(facts),
        "bits": Part(bits),
        "segments": Part(segments),
        "devices": Part(on_both_devices),
        "gemm": Part(gemm, 2.0),
        "speed": Part(speed, 10.0),
        "mlx_lm": Part(beside_mlx_lm, 14.0),
        "packed": Part(packed_rows, 14.0),
        "chunked": Part(chunked, 12.0),
        "cross_entropy": Part(cross_entropy, 6.0),
        "compiled": Part(compiled, 6.0),
        "heartbeats": Part(heartbeats, 3.0),
    }
)


def _or_error(measure: Callable[[], Any]) -> Any:
    """Returns `measure()`, or its error as a sentence: one model that cannot be computed does not stop the others."""
    try:
        return measure()
    except Exception as error:
        return {"error": in_short(error)}


def _digests(case: models.Case) -> list[str]:
    model, batches = case.make(), passes(case.leaf(), TOGETHER)
    digests = []
    for _ in range(TIMES):
        found = leaf_gradient(model, batches)
        parts = [np.array(value.astype(mx.float32)).tobytes() for _, value in sorted(found.items())]
        digests.append(hashlib.sha256(b"".join(parts)).hexdigest())
    return digests


def _distance(case: models.Case) -> float:
    model, batches = case.make(), passes(case.leaf(), TOGETHER)
    whole, cut = (leaf_gradient(model, batches, path) for path in (GradientPath(), GradientPath(segment_size=1)))
    return distance(whole, cut)


def _fastest(work: Callable[[], object], budget: float) -> float:
    """Returns the shortest time of `work` in seconds, measured for about `budget` seconds after a first run."""
    work()
    best, until = float("inf"), time.monotonic() + budget
    while True:
        started = time.monotonic()
        work()
        best = min(best, time.monotonic() - started)
        if time.monotonic() >= until:
            return best
