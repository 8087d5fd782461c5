"""The measurement of scripts/bench_step.py: turns, epochs, counts, and the results as one dictionary."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlxdist.coordinator.batch.batch_order import Step
from mlxdist.coordinator.batch.batch_order import steps as order_steps
from mlxdist.coordinator.config.load import load_config
from mlxdist.coordinator.config.run_spec import run_spec
from mlxdist.coordinator.data.load import read
from mlxdist.coordinator.memory.fit import leaf_limit, resolved_leaf_tokens
from mlxdist.coordinator.training import initial_adapter as adapters
from mlxdist.coordinator.training.adamw import no_moments
from mlxdist.node.work import model as models
from mlxdist.node.work.compute import Computer
from mlxdist.protocol import manifest as manifests
from scripts.bench_step_building import measure_building
from scripts.bench_step_sides import (
    Gradient,
    Theirs,
    Training,
    in_one_process,
    one_node,
    over_the_wire,
    say,
    targets_of,
    their_data,
    train_theirs,
)

GEMM_SIZE = 1024
WIRE_STEP_SECONDS = 1.0  # about, of the step that is computed with and without the wire
WIRE_TIMES = 8  # pairs of this step for each pair of epochs
FORMULA = (
    "sum over rows of t (4 P + 6 A) + 12 t^2 D L, plus 4 s V D: t tokens into the layers, P their matrix parameters, "
    "A LoRA parameters, D hidden size, L layers, s positions in the head, V vocabulary; frozen matrices cost 2 forward "
    "and 2 backward, LoRA 2 and 4, attention counts its full square"
)


def gemm_gflops(repeat: int = 5) -> float:
    """Measures the best speed of a float32 matrix product now, in 10^9 operations per second."""
    a, b = (mx.random.normal((GEMM_SIZE, GEMM_SIZE), key=mx.random.key(seed)) for seed in (1, 2))
    mx.eval(a, b, a @ b)
    seconds = []
    for _ in range(repeat):
        began = time.perf_counter()
        mx.eval(a @ b)
        seconds.append(time.perf_counter() - began)
    return 2e-9 * GEMM_SIZE**3 / min(seconds)


def flops_of(loaded: models.LoadedModel) -> Callable[[Sequence[int], int], float]:
    """Returns FORMULA for this model, as a function of the tokens of each row and the positions in the head."""
    layers = [layer for layer in loaded.model.layers if layer is not None]
    matrices = 0
    for layer in layers:
        for _, module in layer.named_modules():
            if isinstance(module, nn.Linear | nn.QuantizedLinear):
                packed = 32 // module.bits if isinstance(module, nn.QuantizedLinear) else 1
                matrices += module.weight.size * packed
    lora, hidden = manifests.size(loaded.manifest), loaded.model.args.hidden_size

    def flops(rows: Sequence[int], positions: int) -> float:
        through = sum(t * (4 * matrices + 6 * lora) + 12 * t * t * hidden * len(layers) for t in rows)
        return float(through + 4 * positions * loaded.vocab_size * hidden)

    return flops


def pairs_of(values: Sequence[float], steps: int) -> list[float]:
    """Returns the sum over each epoch except the first."""
    return [sum(values[start : start + steps]) for start in range(steps, len(values), steps)]


@dataclass(frozen=True)
class Side:
    """The results of one trainer: seconds of the counted epochs; targets, operations, mean loss of the last."""

    epochs: list[float]
    targets: int
    computed: float
    loss: float

    def figures(self, steps: int, needed: float, peak: float) -> dict[str, float]:
        """Returns figures for the median epoch; `needed` counts operations without padding and unused logits."""
        seconds = statistics.median(self.epochs)
        return {
            "supervised_tokens_per_second": self.targets / seconds,
            "step_seconds": seconds / steps,
            "needed_share_of_gemm_peak": needed / seconds / peak / 1e9,
            "computed_share_of_gemm_peak": self.computed / seconds / peak / 1e9,
            "targets_per_epoch": self.targets,
            "loss_in_the_last_epoch": self.loss,
        }


def measure(folder: Path, lines: Sequence[str], steps: int, pairs: int) -> dict[str, Any]:
    """Measures everything in one run; `folder` has run.toml and the rows, `steps` make an epoch."""
    config = load_config(folder / "run.toml")
    dataset = read(config, progress=lambda what, share: None).train
    rows = [dataset.rows(index)[0] for index in range(len(dataset))]
    data = their_data(config, lines, rows)
    config = resolved_leaf_tokens(config, dataset)
    loaded = models.load_with_lora(run_spec(config, largest_leaf=leaf_limit(config, [dataset])), say)
    first = adapters.draw(loaded.manifest, config.batch.seed)
    loaded.use({name: mx.array(part) for name, part in manifests.split(loaded.manifest, first).items()})
    ours = Training(config, dataset, first, no_moments(len(first)))
    upcoming = order_steps(dataset.lengths.tolist(), config.batch, "sft")
    seconds: list[float] = []
    losses: list[float] = []
    peaks: list[float] = []
    with one_node(config, folder) as fleet:
        wire = over_the_wire(fleet)

        def turn() -> None:
            if len(seconds) % steps == 0:
                say(f"epoch {len(seconds) // steps} of {pairs}" + ("" if seconds else ", to warm up"))
                peaks.append(gemm_gflops())
            took, loss, *after = ours.compute(next(upcoming), wire)
            ours.advance(*after)
            seconds.append(took)
            losses.append(loss)

        theirs = train_theirs(loaded.model, data, config, steps * (pairs + 1), folder, turn)
        say("the same step over the wire and in one process")
        last_epoch = list(islice(upcoming, steps))
        pace = statistics.median(pairs_of(seconds, steps)) / int(dataset.lengths.sum())
        short = short_step(dataset.lengths, WIRE_STEP_SECONDS / pace)
        computer = Computer(loaded, run_spec(config))
        overhead = measure_wire(ours, short, WIRE_TIMES * pairs, wire, in_one_process(computer))
    say("the part of an epoch in which graphs are built")
    building = measure_building(computer, [partial(computed_by, ours, step) for step in last_epoch])
    peaks.append(gemm_gflops())

    targets = sum(int(row.targets.sum()) for row in rows)
    flops = flops_of(loaded)
    leaves = [leaf for step in last_epoch for leaf in ours.leaves(step)]
    widths = [len(row.ids) - 1 for leaf in leaves for row in leaf.rows]
    mine = Side(pairs_of(seconds, steps), targets_of(leaves), flops(widths, targets), sum(losses[-steps:]) / targets)
    its = side_of(theirs, steps, flops)
    if not its.targets == mine.targets == targets:
        raise SystemExit(f"of {targets} targets, mlxdist trained {mine.targets} in an epoch and mlx-lm {its.targets}")
    ratios = [right / left for left, right in zip(mine.epochs, its.epochs, strict=True)]
    lengths = [len(row.ids) for row in rows]
    needed, peak = flops([length - 1 for length in lengths], targets), max(peaks)
    return {
        "ratio": statistics.median(ratios),
        "ratio_by_pair": ratios,
        "mlxdist": mine.figures(steps, needed, peak),
        "mlx_lm": its.figures(steps, needed, peak),
        "wire": overhead,
        "building": building,
        "gemm_peak_gflops": peak,
        "flops": FORMULA,
        "rows": len(rows),
        "row_tokens": {"shortest": min(lengths), "median": statistics.median(lengths), "longest": max(lengths)},
        "trainable_parameters": len(first),
    }


def side_of(theirs: Theirs, steps: int, flops: Callable[[Sequence[int], int], float]) -> Side:
    """Returns the results of mlx-lm. It also trains one padding token of every padded row, which is not counted."""
    last = slice(-steps, None)
    counted = theirs.targets[last]
    loss = sum(mean * count for mean, count in zip(theirs.losses[last], counted, strict=True)) / sum(counted)
    widths = [width for rows, width in theirs.shapes[last] for _ in range(rows)]
    return Side(
        pairs_of(theirs.seconds, steps), sum(counted) - sum(theirs.pads[last]), flops(widths, sum(widths)), loss
    )


def short_step(lengths: npt.NDArray[np.int32], tokens: float) -> Step:
    """Returns a step of the shortest rows that have so many tokens together, at least one row."""
    order = np.argsort(lengths, kind="stable")
    count = int(np.searchsorted(np.cumsum(lengths[order]), tokens)) + 1
    return Step(0, (tuple(order[:count].tolist()),))


def computed_by(ours: Training, step: Step, computer: Computer) -> int:
    """Computes a step in this process, and does not take it. Returns its number of leaves."""
    ours.compute(step, in_one_process(computer))
    return len(ours.leaves(step))


def measure_wire(ours: Training, step: Step, times: int, wire: Gradient, alone: Gradient) -> dict[str, Any]:
    """Measures one step with and without a wire, from the same adapter and moments; the two go first in turn."""
    seconds: dict[Gradient, list[float]] = {wire: [], alone: []}
    same = True
    for turn in range(-1, times):  # the first does not count
        results = {}
        for side in (wire, alone) if turn % 2 else (alone, wire):
            took, _, *results[side] = ours.compute(step, side)
            if turn >= 0:
                seconds[side].append(took)
        same = same and np.array_equal(results[wire][0], results[alone][0])
        ours.advance(*results[wire])
    over = [left - right for left, right in zip(seconds[wire], seconds[alone], strict=True)]
    return {
        "overhead_percent": 100 * statistics.median(o / s for o, s in zip(over, seconds[alone], strict=True)),
        "overhead_percent_of_the_fastest": 100 * (min(seconds[wire]) / min(seconds[alone]) - 1),
        "step_seconds_over_the_wire": statistics.median(seconds[wire]),
        "step_seconds_in_one_process": statistics.median(seconds[alone]),
        "overhead_seconds_by_pair": over,
        "rows": len(step.windows[0]),
        "same_bits": same,
    }
