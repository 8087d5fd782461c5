"""DPO and KTO over the global batch: one loss per pair or row, reference log-probs kept, KTO's reference point global.

Shapes: R rows or pairs of the whole step, in row order.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxdist.coordinator.batch.batch_order import Step
from mlxdist.coordinator.batch.micro_batches import cut, cut_kl
from mlxdist.coordinator.batch.row_store import PairedRows, Rows
from mlxdist.coordinator.config.advice import collapse_advice
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.methods.reference_logps import References
from mlxdist.coordinator.methods.sft import (
    Numbers,
    StepAnswer,
    count_of,
    joined,
    places_named,
    rows_of,
    validation_leaves,
)
from mlxdist.coordinator.methods.step_metrics import Metrics, dpo_metrics, kto_metrics
from mlxdist.coordinator.schedule.rounds import Request
from mlxdist.protocol.errors import NonFiniteError
from mlxdist.protocol.leaves import Leaf
from mlxdist.protocol.losses import PER_TOKEN_MEAN, REFERENCE_POINT
from mlxdist.protocol.objectives import dpo_losses, kto_losses, reference_point

REFERENCES = ("reference", "reference_rejected")  # names of the reference log-probs that travel with a leaf


@dataclass
class Dpo:
    """Direct preference optimization: one loss per pair, averaged over the pairs of the whole step."""

    config: RunConfig
    rows: Rows
    valid: Rows | None
    references: References
    _advised: bool = False

    def gradient(self, fleet: Fleet, step: Step, adapter_version: int) -> StepAnswer:
        """One round: a pair's reference log-probs are computed with its gradient at its first visit."""
        batch = self.config.batch
        leaves = cut(step, self.rows, batch.micro_size, batch.max_length, "dpo")
        order = rows_of(step)
        inputs = per_leaf(leaves, dict(zip(REFERENCES, self.references.take(order).T, strict=True)))
        request = Request(
            "gradient", step.number, adapter_version, leaves, loss=self._loss, scalars=self._scalars, row_inputs=inputs
        )
        with places_named(self.rows, order, leaves):
            grad_sum, answers = fleet.gradient(request)
        numbers = joined(answers)
        self.references.keep(order, numbers[:, 3:5])
        self.references.saved_forwards += forwards_saved(inputs)
        losses, chosen, rejected, ref_chosen, ref_rejected = numbers.T
        metrics = dpo_metrics(chosen, rejected, ref_chosen, ref_rejected, losses, beta=self.config.preference.beta)
        return StepAnswer(grad_sum, len(order), metrics, leaves)

    def evaluate(self, fleet: Fleet, limit: int, adapter_version: int) -> Metrics:
        """Loss, rewards and log-probs over the pairs."""
        leaves = validation_leaves(self.config, self.valid, limit)
        policy, ref = score_rows(fleet, leaves, adapter_version, self.references, limit)
        counts = np.array([row.targets.sum() for leaf in leaves for row in leaf.rows], np.float32).reshape(-1, 2)
        if self._loss in PER_TOKEN_MEAN:
            policy, ref = policy / counts, ref / counts
        (chosen, rejected), (ref_chosen, ref_rejected) = policy.T, ref.T
        with mx.stream(mx.cpu):
            losses = dpo_losses(
                mx.array(chosen),
                mx.array(rejected),
                mx.array(ref_chosen),
                mx.array(ref_rejected),
                loss=self._loss,
                beta=self.config.preference.beta,
                label_smoothing=self.config.preference.label_smoothing,
            )
        beta = self.config.preference.beta
        return dpo_metrics(chosen, rejected, ref_chosen, ref_rejected, np.array(losses), beta=beta)

    def advice(self, metrics: Metrics) -> str | None:
        """The first time: that the rewards collapse."""
        advice = None if self._advised else collapse_advice(metrics)
        self._advised |= advice is not None
        return advice

    @property
    def _loss(self) -> str:
        return self.config.preference.loss

    @property
    def _scalars(self) -> dict[str, float]:
        return {"beta": self.config.preference.beta, "label_smoothing": self.config.preference.label_smoothing}


@dataclass
class Kto:
    """Kahneman-Tversky optimization: one loss per row against a reference point of the whole step."""

    config: RunConfig
    rows: PairedRows
    valid: PairedRows | None
    references: References

    def gradient(self, fleet: Fleet, step: Step, adapter_version: int) -> StepAnswer:
        """Two rounds: the scores of the KL pairs, whose mean is the reference point, then the gradients."""
        batch = self.config.batch
        order = rows_of(step)
        z0 = self._reference_point(fleet, self.rows, step, adapter_version)
        leaves = cut(step, self.rows, batch.micro_size, batch.max_length, "kto")
        labels = self._labels(self.rows)[order]
        inputs = per_leaf(leaves, {"labels": labels, REFERENCES[0]: self.references.take(order)[:, 0]})
        request = Request(
            "gradient", step.number, adapter_version, leaves, loss=self._loss, scalars=self._scalars(z0), row_inputs=inputs
        )
        with places_named(self.rows, order, leaves):
            grad_sum, answers = fleet.gradient(request)
        numbers = joined(answers)
        self.references.keep(order, numbers[:, 2:3])
        self.references.saved_forwards += forwards_saved(inputs)
        losses, policy, ref = numbers.T
        metrics = kto_metrics(policy, ref, labels, losses, z0, beta=self.config.preference.beta)
        return StepAnswer(grad_sum, len(order), metrics, leaves)

    def evaluate(self, fleet: Fleet, limit: int, adapter_version: int) -> Metrics:
        """Loss, rewards and log-probs over the rows, with the reference point of all of them as one batch."""
        assert self.valid is not None
        leaves = validation_leaves(self.config, self.valid, limit)
        whole = Step(adapter_version, (tuple(range(limit)),))
        z0 = self._reference_point(fleet, self.valid, whole, adapter_version) if limit > 1 else 0.0
        policy, ref = (table[:, 0] for table in score_rows(fleet, leaves, adapter_version, self.references, limit))
        labels = self._labels(self.valid)[:limit]
        preference = self.config.preference
        with mx.stream(mx.cpu):
            losses = kto_losses(
                mx.array(policy),
                mx.array(ref),
                mx.array(labels),
                z0,
                loss=self._loss,
                beta=preference.beta,
                desirable_weight=preference.desirable_weight,
                undesirable_weight=preference.undesirable_weight,
            )
        return kto_metrics(policy, ref, labels, np.array(losses), z0, beta=preference.beta)

    def advice(self, metrics: Metrics) -> str | None:
        """Nothing: where the desirable rows became unlikely, their loss is near 1, and nobody takes that for a win."""
        return None

    def _reference_point(self, fleet: Fleet, rows: PairedRows, step: Step, adapter_version: int) -> float:
        if self._loss not in REFERENCE_POINT:
            return 0.0
        leaves = cut_kl(step, rows, self.config.batch.micro_size, self.config.batch.max_length)
        request = Request("score", step.number, adapter_version, leaves, parameters="current+reference")
        with places_named(rows, rows_of(step), leaves):
            scores = fleet.score(request)
            for leaf, numbers in zip(leaves, scores, strict=True):
                if not np.isfinite(numbers).all():
                    named = ", ".join(str(row.row_id) for row in leaf.rows)
                    raise NonFiniteError(
                        f"NaN or Inf in the KL pairs of leaf {leaf.index} of step {step.number} (rows {named}): no "
                        "step was taken. Look at these rows and the ones before them, or lower train.learning_rate",
                        leaf=leaf.index,
                    )
        return reference_point(*joined(scores).T)

    def _labels(self, rows: Rows) -> npt.NDArray[np.uint8]:
        assert rows.labels is not None
        return rows.labels

    @property
    def _loss(self) -> str:
        return self.config.preference.loss

    def _scalars(self, z0: float) -> dict[str, float]:
        preference = self.config.preference
        return {
            "reference_point": z0,
            "beta": preference.beta,
            "desirable_weight": preference.desirable_weight,
            "undesirable_weight": preference.undesirable_weight,
        }


def per_leaf(
    leaves: Iterable[Leaf], columns: Mapping[str, npt.NDArray[np.generic]]
) -> dict[int, dict[str, tuple[float, ...]]]:
    """Columns [R] cut into each leaf's inputs of the loss."""
    inputs, start = {}, 0
    for leaf in leaves:
        stop = start + count_of(leaf)
        inputs[leaf.index] = {name: tuple(map(float, values[start:stop])) for name, values in columns.items()}
        start = stop
    return inputs


def forwards_saved(inputs: Mapping[int, Mapping[str, Sequence[float]]]) -> int:
    """The forwards of rows that a step did without: those of leaves all of whose reference log-probs are known."""
    leaves = [[value for name in REFERENCES for value in leaf.get(name, ())] for leaf in inputs.values()]
    return sum(len(values) for values in leaves if not any(map(math.isnan, values)))


def score_rows(
    fleet: Fleet, leaves: tuple[Leaf, ...], adapter_version: int, references: References, limit: int
) -> tuple[Numbers, Numbers]:
    """The policy's and the reference's log-prob sums of the first `limit` validation rows, [R, branches] each.

    The table of the validation rows is filled at the first time.
    """
    known = references.valid[:limit]
    unknown = np.isnan(known)
    parameters = "current+reference" if unknown.any() else "current"
    numbers = joined(fleet.score(Request("score", adapter_version, adapter_version, leaves, parameters=parameters)))
    branches = known.shape[1]
    if unknown.any():
        known[:] = np.where(unknown, numbers[:, branches:], known)
    else:
        references.saved_forwards += known.size
    return numbers[:, :branches], known
