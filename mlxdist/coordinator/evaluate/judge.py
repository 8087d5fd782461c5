"""Adapters judged on the same rows, one after another, by any fleet that is ready.

Shapes: R rows or pairs, in row order.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mlxdist.coordinator.evaluate.statistics import Values, standard_error
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.methods.method import Method, Scored
from mlxdist.coordinator.methods.step_metrics import Metrics
from mlxdist.protocol.methods import LOSS
from mlxdist.protocol.vectors import Vector


@dataclass(frozen=True)
class Candidate:
    """One adapter to be judged. The base model is a candidate too: the adapter of zeros."""

    name: str
    adapter: Vector
    step: int | None = None


@dataclass(frozen=True)
class Estimate:
    """A number and its standard error over rows; None where there is only one row."""

    value: float
    standard_error: float | None


@dataclass(frozen=True)
class Judged:
    """One candidate on all rows. `metrics` are those of a validation, `loss` among them, in nats."""

    name: str
    step: int | None
    metrics: Metrics
    loss: Estimate
    against_base: Estimate | None  # loss minus that of the base model, over the same rows; None for the base itself
    scored: Scored

    @property
    def perplexity(self) -> Estimate:
        """exp(loss), the perplexity where the loss is one of tokens; its error by the first derivative."""
        value, error = math.exp(min(self.loss.value, 700.0)), self.loss.standard_error
        return Estimate(value, None if error is None else value * error)


def judge(
    fleet: Fleet, method: Method, rows: int, candidates: Sequence[Candidate], told: Callable[[str], None]
) -> list[Judged]:
    """Scores the first `rows` validation rows of `method` under each candidate; the first one is the base model.

    The reference log-probs are computed with the first candidate and kept. `told` is called with the name of the
    candidate that comes next. The bits do not depend on the nodes.
    """
    references, judged = method.unknown_references(), list[Judged]()
    base: Values | None = None
    for version, candidate in enumerate(candidates):
        told(candidate.name)
        fleet.send_adapter(version, candidate.adapter)
        scored, references = method.score(fleet, rows, version, references)
        losses, weights = scored.columns[LOSS].astype(np.float64), weights_of(scored, method)
        metrics = method.metrics(scored.columns, scored.weight, scored.scalars)
        loss = Estimate(metrics[LOSS], standard_error(losses, weights))
        difference = None
        if base is None:
            base = losses
        else:
            change = math.fsum(losses - base) / math.fsum(weights)
            difference = Estimate(change, standard_error(losses - base, weights))
        judged.append(Judged(candidate.name, candidate.step, metrics, loss, difference, scored))
    return judged


def weights_of(scored: Scored, method: Method) -> Values:
    """Returns the weight of each row [R] in the loss: its targets, or 1."""
    if method.spec.weight == "token":
        return np.array(scored.targets.sum(axis=1), np.float64)
    return np.ones(len(scored.order), np.float64)
