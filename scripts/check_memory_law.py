"""Compares the memory that a model's measured law predicts with the memory that its gradient takes, on this machine.

    python -m scripts.check_memory_law               all, a process each (10 minutes): the table of docs/memory.md
    python -m scripts.check_memory_law llama         these

Random float32 models: hidden size 256, eight layers (four of kimi_linear), vocabulary 8192, LoRA of rank 8 on every
linear module. The law is fitted to a few layers, as at the start of a run; then the whole model computes gradients of
rows and of packed leaves. Prints JSON: in each cell MB above the model, measured and predicted, and their ratio.
"""

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

ARCHITECTURES = ("llama", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear")
LEAVES = ((512, 1), (1024, 1), (2048, 1), (1024, 4))  # tokens, and rows of equal length
SEGMENTS = (0, 1)
CHUNK, RANK, VOCABULARY, LONG = 128, 8, 8192, 1024
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 8, "layer_types": None},
    "qwen3": {"num_hidden_layers": 8},
    "qwen3_moe": {"num_hidden_layers": 8},
    "qwen3_next": {"num_hidden_layers": 8, "full_attention_interval": 4},
}
MB = 1e6


def cells(
    architecture: str, leaves: Sequence[tuple[int, int]] = LEAVES, segments: Sequence[int] = SEGMENTS, long: int = LONG
) -> list[dict[str, Any]]:
    """Returns measurement and prediction for every leaf and size of segments, measured in this process.

    `long`: tokens of the longer row to which the law is fitted.
    """
    from mlxdist.node.work.blas import use_openblas

    use_openblas()
    import mlx.core as mx
    import numpy as np

    from mlxdist.coordinator.memory.measured import measured_model
    from mlxdist.coordinator.memory.prediction import LeafSize, model_shape, peak
    from mlxdist.node.backward.backward import GradientPath, backward
    from mlxdist.node.backward.choose_packing import choose_packing
    from mlxdist.node.backward.chunked_layers import has_gated_delta
    from mlxdist.node.backward.events import gathered
    from mlxdist.node.backward.layout import pack
    from mlxdist.node.backward.parameters import trainable
    from mlxdist.node.work.layer_memory import LORA, measure
    from mlxdist.protocol.leaves import Row
    from scripts.check_memory_model import known, wider
    from scripts.tiny_architectures import add_lora, model_of, tiny_config

    values = {**wider(tiny_config(architecture)), **SIZES.get(architecture, {})}
    values.get("text_config", values)["vocab_size"] = VOCABULARY
    table = model_shape({**known(architecture, values), "dtype": "float32"})
    model = model_of(architecture, values)
    add_lora(model, rank=RANK)
    chunked = has_gated_delta(model)
    law = measured_model(measure(model, VOCABULARY, chunked=chunked, long=long))
    for layer in model.layers:
        layer.unfreeze(keys=list(LORA), strict=False)
    mixers = choose_packing(model, GradientPath(chunked=chunked), tokens=64).mixers
    adapter = sum(value.size for value in trainable(model).values())
    shapes = {"law": replace(table, measured=(law,)), "table": table}
    found = []
    for tokens, rows in leaves:
        length = tokens // rows
        ids = np.random.default_rng(0).integers(1, VOCABULARY, (rows, length + 1)).astype(np.int32)
        batch = pack([(Row(i, each, np.ones(length + 1, np.uint8)),) for i, each in enumerate(ids)], mixers)
        leaf = LeafSize(length, tokens, tokens, adapter)
        for segment in segments:
            mx.eval(batch.inputs, batch.positions, batch.ids, batch.targets, batch.rows)
            mx.clear_cache()
            mx.reset_peak_memory()
            before = mx.get_active_memory()
            path = GradientPath(segment_size=segment, chunked=chunked)
            gathered(backward(model, [batch], lambda sums: -sums[0].sum(), head_chunk=CHUNK, path=path))
            taken = mx.get_peak_memory() - before
            cell: dict[str, Any] = {"architecture": architecture, "tokens": tokens, "rows": rows, "segment": segment}
            cell["measured_mb"] = round(taken / MB, 1)
            for name, shape in shapes.items():
                predicted = peak(shape, leaf, segment_size=segment, head_chunk=CHUNK)
                cell[f"{name}_mb"] = round(predicted / MB, 1)
                cell[f"measured_of_{name}"] = round(taken / predicted, 2)
            found.append(cell)
    return found


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--here", metavar="ARCHITECTURE", help="one, in this process")
    asked = parser.parse_args()
    if asked.here:
        print(json.dumps(cells(asked.here)))
        return
    found: list[dict[str, Any]] = []
    for name in asked.architectures:
        command = [sys.executable, "-m", "scripts.check_memory_law", "--here", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found += json.loads(done.stdout.splitlines()[-1])
        print(name, [cell["measured_of_law"] for cell in found[-len(LEAVES) * len(SEGMENTS) :]], file=sys.stderr)
    machine = {"system": platform.system(), "machine": platform.machine(), "mlx": version("mlx")}
    print(json.dumps({"machine": machine, "head_chunk": CHUNK, "cells": found}, indent=1))


if __name__ == "__main__":
    main()
