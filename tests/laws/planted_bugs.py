"""Bugs of the kinds that distributed preference trainers have, each planted into a plain loop.

A law test compares a run with a plain loop by `assert_same_training`. That it would see a bug is shown by running it
against every loop here: a comparison that a planted bug passes proves nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from tests.laws.plain_loops import Parts, PlainStep

NODES = 2


@dataclass(frozen=True)
class Bug:
    """A wrong trainer: how it is wrong, and the methods in which that can show."""

    what: str
    parts: Parts
    methods: tuple[str, ...] = ("sft", "dpo", "kto")


def mask_one_early(targets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Counts the prompt's last token, and not the row's."""
    return np.concatenate([targets[:, 1:], np.zeros_like(targets[:, :1])], axis=1)


def one_pad_target(targets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Counts the first pad token of every padded row, as mlx-lm does."""
    places = np.arange(targets.shape[1])[None, :]
    return np.maximum(targets, (places == lengths[:, None]).astype(targets.dtype))


def first_target_lost(targets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Leaves the first target out where another follows."""
    later = targets * np.concatenate([np.zeros_like(targets[:, :1]), targets[:, :-1]], axis=1)
    return np.where(later.sum(axis=1, keepdims=True) > 0, later, targets)


def node_parts(count: int) -> list[slice]:
    """The rows of each node, as uneven as a batch of odd size makes them."""
    first = max(1, count // NODES - 1) if count > 1 else count
    return [part for part in (slice(0, first), slice(first, count)) if part.start < part.stop]


def mean_of_means(losses: mx.array, weights: mx.array) -> mx.array:
    """Each node divides by its own weight, and then they average."""
    means = [losses[part].sum() / weights[part].sum() for part in node_parts(len(losses))]
    return sum(means[1:], means[0]) / len(means)


def mean_of_row_means(losses: mx.array, weights: mx.array) -> mx.array:
    """Every row counts the same, however many targets it has."""
    return (losses / weights).mean()


def roll_within_nodes(count: int) -> list[int]:
    """KL pairs are made of what one node has."""
    givers: list[int] = []
    for part in node_parts(count):
        inside = list(range(count))[part]
        givers += [inside[-1], *inside[:-1]]
    return givers


def roll_the_other_way(count: int) -> list[int]:
    """Row i takes the completion of row i + 1."""
    return [(i + 1) % count for i in range(count)]


BUGS = {
    "mask off by one": Bug("prompt's last token counted, row's last not", Parts(mask=mask_one_early)),
    "one pad target": Bug("a pad token counted per padded row", Parts(mask=one_pad_target)),
    "first target lost": Bug("the first target not counted", Parts(mask=first_target_lost)),
    "mean of means": Bug("nodes divide by their own weight", Parts(mean=mean_of_means)),
    "mean of row means": Bug("rows weigh the same", Parts(mean=mean_of_row_means), ("sft",)),
    "sum for mean": Bug("never divided", Parts(mean=lambda losses, weights: losses.sum())),
    "roll within nodes": Bug("KL pairs made per node", Parts(roll=roll_within_nodes), ("kto",)),
    "roll the other way": Bug("KL pairs take the next completion", Parts(roll=roll_the_other_way), ("kto",)),
    "un-clamped z0": Bug("a negative reference point used", Parts(clamp=lambda z0: z0), ("kto",)),
    "reference with dropout": Bug("reference in training mode", Parts(reference_dropout=0.3), ("dpo", "kto")),
    "no bias correction": Bug("mlx's default AdamW", Parts(bias_correction=False)),
    "schedule one late": Bug("the learning rate of the step before", Parts(updates_done=lambda step: max(step - 2, 0))),
}


def assert_same_training(
    ours: Sequence[PlainStep], plain: Sequence[PlainStep], relative: float = 1e-5, *, norm: float | None = None
) -> None:
    """Every metric, the norm before clipping and the adapter agree at every step.

    Metrics to `relative` (the norm to `norm`, where given) of their size or of 1, whichever is larger. The adapter to
    `relative` in the 2-norm, and each tensor to ten times that: AdamW divides every element by its own size, so that
    the rounding of one whose gradient is almost 0 comes out as large as its update.
    """
    assert len(ours) == len(plain), f"{len(ours)} steps against {len(plain)}"
    for number, (left, right) in enumerate(zip(ours, plain, strict=True), start=1):
        names = left.metrics.keys() ^ right.metrics.keys()
        assert not names, f"step {number}: metrics {names} on one side"
        for name, expected in (*right.metrics.items(), ("grad_norm", right.grad_norm)):
            found = left.grad_norm if name == "grad_norm" else left.metrics[name]
            off, allowed = abs(found - expected), norm if norm and name == "grad_norm" else relative
            assert off <= allowed * max(abs(expected), 1.0), f"step {number}: {name} {found} against {expected}"
        tensors = left.adapter.keys() ^ right.adapter.keys()
        assert not tensors, f"step {number}: tensors {tensors} on one side"
        apart = {name: _norm(left.adapter[name] - right.adapter[name]) for name in right.adapter}
        sizes = {name: _norm(tensor) for name, tensor in right.adapter.items()}
        for name, off in apart.items():
            assert off <= 10 * relative * sizes[name], f"step {number}: {name} is off by {off / sizes[name]}"
        whole = math.hypot(*apart.values()) / math.hypot(*sizes.values())
        assert whole <= relative, f"step {number}: the adapter is off by {whole}"


def _norm(tensor: np.ndarray) -> float:
    return float(np.linalg.norm(tensor.astype(np.float64)))
