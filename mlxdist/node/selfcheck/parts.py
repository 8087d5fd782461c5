"""The measurements of the self-check. Each runs in a process of its own: a crash in one is a result and ends no other.

python -m mlxdist.node.selfcheck.selfcheck bits      # prints one JSON object
"""

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxdist.node.backward.backward import Batch, GradientPath, MicroBatch, backward
from mlxdist.node.backward.choose_packing import PackingChoice
from mlxdist.node.backward.events import gathered
from mlxdist.node.selfcheck import models
from mlxdist.node.work.objective import passes

TIMES = 5  # that each leaf's gradient is computed
HEAD_CHUNK = 16
GEMM_SIZE, GEMM_SECONDS = 1024, 2.0
EXACT_SIZE = 256  # of the product that is compared with float64
HEARTBEAT, EVALUATION_SECONDS = 0.02, 3.0
SPEED_LENGTH, SPEED_SECONDS = 512, 8.0
SPEED_MODEL = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "intermediate_size": 704,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 8192,
}


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


def gemm() -> dict[str, Any]:
    """Returns the error of a float32 matrix product against float64, and the GFLOP/s of a large one."""
    random = np.random.default_rng(0)
    left, right = (random.standard_normal((EXACT_SIZE, EXACT_SIZE)).astype(np.float32) for _ in range(2))
    exact = left.astype(np.float64) @ right.astype(np.float64)
    got = np.array(mx.array(left) @ mx.array(right), np.float64)
    large = mx.array(random.standard_normal((GEMM_SIZE, GEMM_SIZE)).astype(np.float32))
    seconds = _fastest(lambda: mx.eval(large @ large), GEMM_SECONDS)
    error = float(np.linalg.norm(got - exact) / np.linalg.norm(exact))
    return {"relative_error": error, "gflops": 2 * GEMM_SIZE**3 / seconds / 1e9}


def segments() -> dict[str, Any]:
    """Returns each case's distance between the segmented and the whole graph's gradient, relative to the latter."""
    return {name: _or_error(partial(_distance, case)) for name, case in models.CASES.items()}


def heartbeats() -> dict[str, Any]:
    """Returns the longest gap between two heartbeats of a thread beside a long evaluation, in seconds."""
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
    for _ in range(max(int(EVALUATION_SECONDS / a_product), 1)):
        out = out @ square
    mx.eval(out)
    seconds = time.monotonic() - started
    done.set()
    thread.join()
    return {"evaluation_seconds": seconds, "longest_gap_seconds": gaps[0]}


def speed() -> dict[str, Any]:
    """Returns a small llama's training tokens/s and peak bytes above the model, whole and in segments of one layer."""
    model = models.dense(**SPEED_MODEL)
    random = np.random.default_rng(0)
    ids = random.integers(0, SPEED_MODEL["vocab_size"], (1, SPEED_LENGTH + 1)).astype(np.int32)
    batch = MicroBatch(ids[:, :-1], ids[:, 1:], np.ones((1, SPEED_LENGTH), np.float32))
    found: dict[str, Any] = {}
    for name, path in (("whole", GradientPath()), ("segment 1", GradientPath(segment_size=1))):
        mx.clear_cache()
        mx.reset_peak_memory()
        held = mx.get_active_memory()
        seconds = _fastest(partial(_leaf_gradient, model, [batch], path, 128), SPEED_SECONDS)
        found[name] = {"tokens_per_second": SPEED_LENGTH / seconds, "peak_bytes": mx.get_peak_memory() - held}
    return found


PARTS: Mapping[str, Callable[[], dict[str, Any]]] = MappingProxyType(
    {"facts": facts, "bits": bits, "gemm": gemm, "segments": segments, "heartbeats": heartbeats, "speed": speed}
)


def _or_error(measure: Callable[[], Any]) -> Any:
    """Returns `measure()`, or its error as a sentence: one model that cannot be computed does not stop the others."""
    try:
        return measure()
    except Exception as error:
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())[:200]}


def _leaf_gradient(
    model: nn.Module, batches: Sequence[Batch], path: GradientPath, head_chunk: int = HEAD_CHUNK
) -> dict[str, mx.array]:
    events = backward(model, batches, lambda rows: -rows[0].sum(), head_chunk=head_chunk, path=path, dropout_key=0)
    sums, grads = gathered(events)
    return {"row sums": sums[0], **grads}


def _digests(case: models.Case) -> list[str]:
    model, batches = case.make(), passes(case.leaf(), PackingChoice())
    digests = []
    for _ in range(TIMES):
        found = _leaf_gradient(model, batches, GradientPath())
        parts = [np.array(value.astype(mx.float32)).tobytes() for _, value in sorted(found.items())]
        digests.append(hashlib.sha256(b"".join(parts)).hexdigest())
    return digests


def _distance(case: models.Case) -> float:
    model, batches = case.make(), passes(case.leaf(), PackingChoice())
    whole, cut = (_leaf_gradient(model, batches, path) for path in (GradientPath(), GradientPath(segment_size=1)))
    expected, got = (
        np.concatenate([np.array(found[name].astype(mx.float32), np.float64).ravel() for name in sorted(found)])
        for found in (whole, cut)
    )
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


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
