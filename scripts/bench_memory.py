"""Measures memory and time of one leaf's gradient: plain autograd, mlx-lm's grad_checkpoint, and our paths.

    python -m scripts.bench_memory                                   all 63 cells (an hour on two cores)
    python -m scripts.bench_memory --methods sft --lengths 1024      some

A random llama-like model (hidden 256, 16 layers, vocabulary 32768, float32) with LoRA on all its linear modules, one
row (one pair for DPO), every position a target. A subprocess per cell; memory is MLX's peak above the model, time the
shorter of two gradients, for KTO with the score of its first round. Prints JSON: the cells, and each path against the
plain one.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

PLAIN, CHECKPOINT, AUTO = "plain", "grad_checkpoint", "auto"
PATHS = (PLAIN, CHECKPOINT, "1", "2", "4", "8", AUTO)
METHODS = ("sft", "dpo", "kto")
LENGTHS = (512, 1024, 2048)
LAYERS, HIDDEN, HEADS, VOCABULARY = 16, 256, 4, 32768
HEAD_CHUNK = 128
SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": HIDDEN // HEADS,
    "intermediate_size": 3 * HIDDEN,
    "vocab_size": VOCABULARY,
    "layer_types": None,
    "dtype": "float32",
}
MB = 1e6


def measure(method: str, path: str, length: int, free: float) -> dict[str, Any]:
    """Measures one cell in this process. `free`: the bytes that "auto" may take."""
    from mlxdist.node.work.blas import use_openblas

    use_openblas()
    import mlx.core as mx

    from mlxdist.coordinator.memory import prediction as memory
    from scripts.tiny_architectures import add_lora, tiny_model

    model = tiny_model("llama", **SHAPE)
    add_lora(model, rank=8)
    adapter = sum(value.size for value in _trainable(model).values())
    rows = 2 if method == "dpo" else 1
    size = memory.LeafSize(length, rows * length, rows * length, adapter)
    shape = memory.model_shape(SHAPE)
    segment, chunk = 0, HEAD_CHUNK
    if path == AUTO:
        settings = memory.choose(shape, size, free)
        if settings is None:
            return {"method": method, "path": path, "length": length, "fits": False}
        segment, chunk = settings.segment_size, settings.head_chunk
    elif path not in (PLAIN, CHECKPOINT):
        segment = int(path)
    work = _work(model, method, path, length, segment, chunk)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    seconds = min(_seconds(work) for _ in range(2))
    cell: dict[str, Any] = {
        "method": method,
        "path": path,
        "length": length,
        "peak_mb": round((mx.get_peak_memory() - before) / MB, 1),
        "seconds": round(seconds, 2),
    }
    if path not in (PLAIN, CHECKPOINT):
        predicted = memory.peak(shape, size, segment_size=segment, head_chunk=chunk)
        cell |= {"segment_size": segment, "head_chunk": chunk, "predicted_mb": round(predicted / MB, 1)}
        if segment == 1:
            layer = one_layer(model, length, HIDDEN, rows)
            parts = law_bytes(model, layer, length, rows, HIDDEN, chunk, VOCABULARY)
            cell["law_mb"] = round(parts / MB, 1)
    return cell


def one_layer(model: Any, length: int, hidden: int, rows: int = 1) -> int:
    """Returns the peak bytes of plain autograd through one layer alone, over rows of `length`, without our code."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten

    layer = model.layers[1]
    mx.eval(model.parameters())
    names, values = zip(*tree_flatten(layer.trainable_parameters()), strict=True)
    border = mx.random.normal((rows, length, hidden))

    def forward(*arrays: mx.array) -> list[mx.array]:
        layer.update(tree_unflatten(list(zip(names, arrays[1:], strict=True))))
        return [layer(arrays[0], "causal")]

    mx.eval(border)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    _, cotangents = mx.vjp(forward, [border, *values], [border])
    mx.eval(cotangents)
    layer.update(tree_unflatten(list(zip(names, values, strict=True))))
    return int(mx.get_peak_memory() - before)


def law_bytes(model: Any, layer: int, length: int, rows: int, hidden: int, head_chunk: int, vocabulary: int) -> int:
    """Returns the bytes that segments of one layer may hold: one layer, a chunk of logits, the borders, the adapter."""
    adapter = sum(value.size for value in _trainable(model).values())
    borders = rows * len(model.layers) * length * hidden
    return layer + 4 * (head_chunk * vocabulary + borders + adapter)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _trainable(model: Any) -> dict[str, Any]:
    from mlxdist.node.backward.parameters import trainable

    return trainable(model)


def _work(model: Any, method: str, path: str, length: int, segment: int, chunk: int) -> Callable[[], object]:
    """Returns the gradient of one leaf on `path`, as a call."""
    import mlx.core as mx
    import mlx.nn as nn
    import numpy as np

    from mlxdist.node.backward.backward import GradientPath, backward, score
    from mlxdist.node.backward.events import gathered
    from mlxdist.node.backward.grad_checkpoint import checkpointed
    from mlxdist.node.backward.layout import pack
    from mlxdist.protocol.leaves import Row
    from scripts.plain_gradient import padded_rows, plain_gradient, plain_sums

    def rows(seed: int) -> Any:
        return padded_rows(seed, [length + 1], [length], VOCABULARY)

    def packed(*batches: Any) -> list[Any]:
        """The same rows as a node takes them: one item, packed."""
        ids = [np.append(batch.inputs[0], batch.targets[0, -1]) for batch in batches]
        return [pack([tuple(Row(0, each, np.ones(len(each), np.uint8)) for each in ids)])]

    batches = [rows(1), rows(2)] if method == "dpo" else [rows(1)]

    def loss(sums: list[mx.array]) -> mx.array:
        of_rows = mx.concatenate(sums)
        if method == "sft":
            return -of_rows.sum()
        if method == "dpo":
            return -nn.log_sigmoid(0.1 * (of_rows[0] - of_rows[1]))
        return (1 - mx.sigmoid(0.1 * (of_rows + 10.0 * length - 0.5))).sum()

    def plain() -> object:
        if method == "kto":
            mx.eval(plain_sums(model, rows(3)))
        return plain_gradient(model, batches, loss)

    def checkpoint() -> object:
        with checkpointed(model):
            return plain()

    def ours() -> object:
        taken = GradientPath(segment_size=segment)
        if method == "kto":
            score(model, *packed(rows(3)), head_chunk=chunk, path=taken)
        return gathered(backward(model, packed(*batches), loss, head_chunk=chunk, path=taken))

    return {PLAIN: plain, CHECKPOINT: checkpoint}.get(path, ours)


def against_plain(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns each cell's memory and time as shares of plain autograd's and grad_checkpoint's at the same place."""
    at = {(cell["method"], cell["path"], cell["length"]): cell for cell in cells if "peak_mb" in cell}
    shares = []
    for (method, path, length), cell in at.items():
        plain, checkpoint = at.get((method, PLAIN, length)), at.get((method, CHECKPOINT, length))
        if path in (PLAIN, CHECKPOINT) or plain is None or checkpoint is None:
            continue
        shares.append(
            {
                "method": method,
                "path": path,
                "length": length,
                "peak_of_plain": round(cell["peak_mb"] / plain["peak_mb"], 3),
                "peak_of_grad_checkpoint": round(cell["peak_mb"] / checkpoint["peak_mb"], 3),
                "seconds_of_plain": round(cell["seconds"] / plain["seconds"], 2),
                "measured_of_predicted": round(cell["peak_mb"] / cell["predicted_mb"], 2),
            }
        )
    return shares


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--free-mb", type=float, default=300, help='memory that "auto" may take beside the model')
    parser.add_argument("--here", action="store_true", help="the first cell, in this process")
    asked = parser.parse_args()
    if asked.here:
        print(json.dumps(measure(asked.methods[0], asked.paths[0], asked.lengths[0], asked.free_mb * MB)))
        return
    cells = []
    for length in asked.lengths:
        for method in asked.methods:
            for path in asked.paths:
                cells.append(_apart(method, path, length, asked.free_mb))
                print(cells[-1], file=sys.stderr, flush=True)
    print(
        json.dumps(
            {
                "machine": {"system": platform.system(), "machine": platform.machine(), "mlx": version("mlx")},
                "model": SHAPE,
                "cells": cells,
                "against_plain": against_plain(cells),
            },
            indent=1,
        )
    )


def _apart(method: str, path: str, length: int, free_mb: float) -> dict[str, Any]:
    where = ["--methods", method, "--paths", path, "--lengths", str(length), "--free-mb", str(free_mb)]
    command = [sys.executable, "-m", "scripts.bench_memory", "--here", *where]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    cell: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return cell


if __name__ == "__main__":
    main()
