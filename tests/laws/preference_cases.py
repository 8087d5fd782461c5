"""The rows and settings of the preference laws: few, tiny, and of very different lengths."""

from collections.abc import Sequence

import numpy as np

from mlxdist.coordinator.config.schema import BatchConfig
from mlxdist.protocol.losses import DPO_LOSSES, KTO_LOSSES
from tests.laws.plain_model import KtoRow, PlainRow, dpo_steps, joined, kto_steps, random_ids
from tests.laws.preference_runs import Case, Pair

LOSSES = [*DPO_LOSSES, *KTO_LOSSES]
BATCH = BatchConfig(size=3, leaf_tokens=16, order="shuffled", remainder="keep", max_length=40)


def pairs(count: int = 7, seed: int = 0) -> list[Pair]:
    return dpo_steps(seed, steps=1, size=count)[0]


def labeled(labels: Sequence[int] = (1, 0, 1, 1, 0, 0, 1), seed: int = 1) -> list[KtoRow]:
    return kto_steps(seed, labels=[labels])[0]


def of_very_different_lengths() -> list[Pair]:
    """Pairs of 2 to 39 tokens a side: one long against short, one with a single target, one with an empty prompt."""
    rng = np.random.default_rng(3)

    def row(prompt: int, completion: int) -> PlainRow:
        return joined(random_ids(rng, prompt), random_ids(rng, completion))

    lengths = [((1, 38), (1, 1)), ((30, 1), (30, 9)), ((2, 2), (2, 37)), ((19, 20), (19, 1)), ((1, 1), (1, 1))]
    return [(row(*chosen), row(*rejected)) for chosen, rejected in lengths]


def case_of(loss: str, batch: BatchConfig = BATCH, **values: object) -> Case:
    """Seven rows in steps of 3, 3 and 1 pairs, or of 3 and 4 KTO rows: every row comes twice or more in 5 steps."""
    if loss in KTO_LOSSES:
        values = {"rows": labeled(), "method": "kto", "weights": (1.0, 1.25), **values}
    return Case(**{"rows": pairs(), "loss": loss, "batch": batch, **values})  # type: ignore[arg-type]
