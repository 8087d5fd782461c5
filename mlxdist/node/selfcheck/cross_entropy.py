"""`mx.fast.cross_entropy` beside the log-probs of our head. mlxdist does not use it; a GPU may change that."""

from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxdist.node.backward.head import log_probs
from mlxdist.node.selfcheck.turns import in_turns

POSITIONS, VOCABULARY = 256, 8192
TYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}

Loss = Callable[[mx.array], mx.array]  # logits [P, V] -> the loss of each position [P]
Exact = npt.NDArray[np.float64]


def cross_entropy(seconds: float, positions: int = POSITIONS, vocabulary: int = VOCABULARY) -> dict[str, Any]:
    """Compares loss and gradient over `positions` x `vocabulary` logits, in float32 and in bfloat16.

    Returns:
        By type the result of `compared`, and "errors" of each side against float64: "loss", the largest of a position
        in nats, and "gradient", relative (2-norm). {"absent": …} where this mlx has no such function.
    """
    fused = getattr(mx.fast, "cross_entropy", None)
    if fused is None:
        return {"absent": f"mlx {version('mlx')} has no mx.fast.cross_entropy"}
    return {name: _of_type(kind, fused, positions, vocabulary, seconds / len(TYPES)) for name, kind in TYPES.items()}


def _of_type(
    kind: mx.Dtype, fused: Callable[..., mx.array], positions: int, vocabulary: int, seconds: float
) -> dict[str, Any]:
    random = np.random.Generator(np.random.PCG64(13))
    logits = mx.array(random.standard_normal((positions, vocabulary), dtype=np.float32) * 4).astype(kind)
    targets = mx.array(random.integers(0, vocabulary, positions, dtype=np.int32))
    sides: dict[str, Loss] = {
        "log-probs": lambda x: -log_probs(x, targets),
        "mx.fast.cross_entropy": lambda x: fused(x, targets),
    }
    runs = {name: partial(_computed, loss, logits) for name, loss in sides.items()}
    found = in_turns(runs, seconds)
    exact = _exact(logits, targets)
    return {**found, "errors": {name: _errors(run(), exact) for name, run in runs.items()}}


def _computed(loss: Loss, logits: mx.array) -> tuple[mx.array, mx.array]:
    """Returns the losses [P] and the gradient of their sum [P, V]."""
    (losses,), (gradient,) = mx.vjp(lambda x: [loss(x)], [logits], [mx.ones(logits.shape[:1])])
    mx.eval(losses, gradient)
    return losses, gradient


def _exact(logits: mx.array, targets: mx.array) -> tuple[Exact, Exact]:
    """Returns the same in float64."""
    x: Exact = np.array(logits.astype(mx.float32), np.float64)
    x -= x.max(axis=1, keepdims=True)
    sums = np.exp(x).sum(axis=1, keepdims=True)
    place = np.arange(len(x)), np.array(targets)
    gradient = np.exp(x) / sums
    gradient[place] -= 1
    return np.log(sums[:, 0]) - x[place], gradient


def _errors(got: tuple[mx.array, mx.array], exact: tuple[Exact, Exact]) -> dict[str, float]:
    losses, gradient = (
        np.array(each.astype(mx.float32), np.float64) - true for each, true in zip(got, exact, strict=True)
    )
    return {
        "loss": float(np.abs(losses).max()),
        "gradient": float(np.linalg.norm(gradient) / np.linalg.norm(exact[1])),
    }
