"""SFT, DPO, KTO and ORPO: the scalars, the metrics and the advice of each. The steps they share are in `method`."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

import numpy as np

from mlxdist.coordinator.batch.batch_order import Step
from mlxdist.coordinator.batch.micro_batches import cut_kl
from mlxdist.coordinator.batch.row_store import PairedRows, Rows
from mlxdist.coordinator.config.advice import collapse_advice
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.methods.method import Method, places_named
from mlxdist.coordinator.methods.step_metrics import Metrics, dpo_metrics, kto_metrics, orpo_metrics, sft_metrics
from mlxdist.protocol.errors import NonFiniteError
from mlxdist.protocol.losses import REFERENCE_POINT
from mlxdist.protocol.methods import DPO, KTO, ORPO, SFT, Columns, columns_of
from mlxdist.protocol.objectives import reference_point


@dataclass
class Sft(Method):
    """Supervised fine-tuning: cross-entropy, averaged over the supervised tokens of the whole step."""

    def metrics(self, columns: Columns, weight: int, scalars: Mapping[str, float]) -> Metrics:
        """Returns the loss over the supervised tokens."""
        return sft_metrics(columns, weight)


@dataclass
class Dpo(Method):
    """Direct preference optimization: one loss for each pair, averaged over the pairs of the whole step."""

    _advised: bool = False

    def scalars(self, fleet: Fleet, rows: Rows, step: Step, adapter_version: int) -> dict[str, float]:
        """Returns beta and the label smoothing."""
        preference = self.config.preference
        return {"beta": preference.beta, "label_smoothing": preference.label_smoothing}

    def metrics(self, columns: Columns, weight: int, scalars: Mapping[str, float]) -> Metrics:
        """Returns loss, rewards and log-probs over the pairs."""
        return dpo_metrics(columns, beta=scalars["beta"])

    def advice(self, metrics: Metrics) -> str | None:
        """Returns a sentence the first time that the rewards collapse."""
        advice = None if self._advised else collapse_advice(metrics)
        self._advised |= advice is not None
        return advice


@dataclass
class Kto(Method):
    """Kahneman-Tversky optimization: one loss for each row against a reference point of the whole step.

    It gives no advice: where desirable rows became unlikely, their loss is near 1, which does not look like success.
    """

    def scalars(self, fleet: Fleet, rows: Rows, step: Step, adapter_version: int) -> dict[str, float]:
        """Returns the reference point of the step, beta, and the weights. The KL pairs are scored in an extra round."""
        preference = self.config.preference
        scored = self.loss in REFERENCE_POINT and len(step.rows) > 1
        paired = cast(PairedRows, rows)
        return {
            "reference_point": self._reference_point(fleet, paired, step, adapter_version) if scored else 0.0,
            "beta": preference.beta,
            "desirable_weight": preference.desirable_weight,
            "undesirable_weight": preference.undesirable_weight,
        }

    def metrics(self, columns: Columns, weight: int, scalars: Mapping[str, float]) -> Metrics:
        """Returns loss, reference point, rewards and log-probs over the rows."""
        return kto_metrics(columns, scalars["reference_point"], beta=scalars["beta"])

    def _reference_point(self, fleet: Fleet, rows: PairedRows, step: Step, adapter_version: int) -> float:
        pairs = cut_kl(step, rows, self.leaf_tokens)
        leaves = pairs.leaves
        request = self._score_request(step.number, adapter_version, leaves, "current+reference")
        with places_named(rows, pairs.order, leaves):
            answers = fleet.score(request)
            for leaf, row_outputs in zip(leaves, answers, strict=True):
                if not np.isfinite(row_outputs).all():
                    named = ", ".join(str(row.row_id) for row in leaf.rows)
                    raise NonFiniteError(
                        f"NaN or Inf in the KL pairs of leaf {leaf.index} of step {step.number} (rows {named}): no "
                        "step was taken. Look at these rows and the ones before them, or lower train.learning_rate",
                        leaf=leaf.index,
                    )
        scores = columns_of(self.spec.scores(request.parameters), np.concatenate(answers))
        return reference_point(scores["policy"], scores["ref"])


@dataclass
class Orpo(Method):
    """Odds-ratio preference optimization: cross-entropy of the chosen text, and the odds of chosen over rejected."""

    def scalars(self, fleet: Fleet, rows: Rows, step: Step, adapter_version: int) -> dict[str, float]:
        """Returns beta, and the weight that turns a division by pairs into one by the step's tokens of text."""
        tokens = sum(int(rows.rows(row)[2].targets.sum()) for row in step.rows)
        return {"beta": self.config.preference.beta, "text_weight": len(step.rows) / tokens}

    def metrics(self, columns: Columns, weight: int, scalars: Mapping[str, float]) -> Metrics:
        """Returns loss, its two parts, rewards and log-probs over the pairs."""
        return orpo_metrics(columns, beta=scalars["beta"], text_weight=scalars["text_weight"])


KINDS: Mapping[str, type[Method]] = MappingProxyType({SFT.name: Sft, DPO.name: Dpo, KTO.name: Kto, ORPO.name: Orpo})
