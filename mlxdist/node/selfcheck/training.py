"""The speed of training a small llama: on the whole graph, in segments, and beside mlx-lm's own trainer."""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxdist.node.backward.backward import GradientPath
from mlxdist.node.selfcheck import models
from mlxdist.node.selfcheck.gradients import TOGETHER, leaf_gradient, train_step
from mlxdist.node.selfcheck.rows import rows_leaf
from mlxdist.node.selfcheck.turns import LEAST_ROUNDS, Start, Taken, compared, in_turns, least_rounds
from mlxdist.node.work.objective import passes
from mlxdist.protocol.leaves import Leaf

HEAD_CHUNK = 128
SPEED_LENGTH = 512
LENGTHS, PROMPT = (58, 97, 143, 214), 32  # tokens of the rows beside mlx-lm, of the prompt of each
PAD_TO = 32  # mlx-lm pads the rows of a batch to the next multiple of it, and one more
SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "intermediate_size": 704,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": 8192,
    }
)


def speed(seconds: float, sizes: Mapping[str, Any] = SIZES, length: int = SPEED_LENGTH) -> dict[str, Any]:
    """Returns a small llama's training tokens/s and peak bytes above the model, whole and in segments of one layer."""
    model = models.dense(**sizes)
    batches = passes(rows_leaf([length + 1], sizes["vocab_size"]), TOGETHER)
    paths = {"whole": GradientPath(), "segment 1": GradientPath(segment_size=1)}
    found = in_turns(
        {name: partial(leaf_gradient, model, batches, path, HEAD_CHUNK) for name, path in paths.items()}, seconds
    )
    return {
        name: {"tokens_per_second": length / side["seconds"], "peak_bytes": side["peak_bytes"]}
        for name, side in found["sides"].items()
    }


def beside_mlx_lm(seconds: float, sizes: Mapping[str, Any] = SIZES, lengths: Sequence[int] = LENGTHS) -> dict[str, Any]:
    """Compares a step of `mlx_lm.tuner.train` with a node's gradient and the same optimizer's update, in turns.

    Both train the same llama on the same rows with masked prompts: mlx-lm pads them to one batch, a node packs them
    into one leaf.

    Returns:
        The result of `compared`, and "losses": of both sides, the mean loss of each of the first steps.
    """
    from mlx.optimizers import AdamW

    theirs, ours = (models.dense(**sizes) for _ in range(2))
    leaf = rows_leaf(lengths, sizes["vocab_size"], PROMPT)
    optimizer = AdamW(1e-4)
    rounds: list[tuple[Taken, Taken]] = []
    losses: dict[str, list[float]] = {"mlx-lm": [], "mlxdist": []}

    def batches(**_: Any) -> Iterator[tuple[mx.array, mx.array]]:
        """Feeds mlx-lm's trainer. Its time between two requests for a batch is that of its step."""
        until = time.monotonic() + seconds
        while len(rounds) <= least_rounds(seconds) or time.monotonic() < until:
            start = Start.now()
            yield padded(leaf)
            step = start.taken()
            start = Start.now()
            losses["mlxdist"].append(train_step(ours, optimizer, leaf, head_chunk=HEAD_CHUNK))
            rounds.append((step, start.taken()))

    _run_their_trainer(theirs, AdamW(1e-4), batches, losses["mlx-lm"])
    first = {name: each[:LEAST_ROUNDS] for name, each in losses.items()}  # later ones amplify differences of rounding
    return {**compared(tuple(losses), rounds[1:]), "lengths": list(lengths), "losses": first}


def padded(leaf: Leaf) -> tuple[mx.array, mx.array]:
    """Returns a leaf as a batch of mlx-lm: ids [B, L], and of each row its first and its last target [B, 2]."""
    longest = max(len(row.ids) for row in leaf.rows)
    ids = np.zeros((len(leaf.rows), 1 + PAD_TO * -(-longest // PAD_TO)), np.int32)
    targets = []
    for place, row in enumerate(leaf.rows):
        ids[place, : len(row.ids)] = row.ids
        targets.append([int(np.flatnonzero(row.targets)[0]), len(row.ids) - 1])
    return mx.array(ids), mx.array(targets)


def _run_their_trainer(model: nn.Module, optimizer: Any, batches: Any, losses: list[float]) -> None:
    """Runs mlx-lm's trainer until `batches` end, and adds the loss of every step to `losses`."""
    from mlx_lm.tuner.callbacks import TrainingCallback
    from mlx_lm.tuner.trainer import TrainingArgs, train

    class Reports(TrainingCallback):
        def on_train_loss_report(self, train_info: Mapping[str, Any]) -> None:
            losses.append(float(train_info["train_loss"]))

    # A fast machine takes thousands of steps, and mlx-lm prints a line for each.
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        never = 10**9
        arguments = TrainingArgs(iters=never, steps_per_report=1, steps_per_save=never)
        arguments.adapter_file = str(Path(folder) / "adapters.safetensors")
        train(model, optimizer, None, args=arguments, iterate_batches=batches, training_callback=Reports())
