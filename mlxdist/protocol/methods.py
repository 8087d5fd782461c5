"""The training methods, one object each: how they differ, except for their formulas. Both sides read this table.

The formulas are in `objectives`. The rounds of a step and its metrics are in `coordinator.methods`. There is no mlx
here, so that reading a configuration needs none.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import Literal

import numpy as np
import numpy.typing as npt

from mlxdist.protocol.errors import ConfigError
from mlxdist.protocol.losses import DPO_LOSSES, KTO_LOSSES, LABEL_SMOOTHING, ORPO_LOSSES, REFUSED

Column = npt.NDArray[np.float32]  # [R] one number for each row or pair
Columns = Mapping[str, Column]

LOSS, LABELS = "loss", "labels"  # columns that do not depend on the method
PAIR_FORMATS = ("prompt, chosen, rejected", "chosen, rejected")

MethodName = Literal["sft", "dpo", "kto", "orpo"]  # the keys of METHODS, for type checkers


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodSpec:
    """One method. An item is what the batch size counts: a row, or a pair of a chosen and a rejected row.

    A column has one number for each item. `policy` and `reference` name the columns of log-probabilities, one for each
    branch. Under the same names they travel as inputs of the loss and as outputs of a leaf.
    """

    name: str
    item: Literal["row", "pair"]
    weight: Literal["token", "row", "pair"]  # the loss is averaged over these
    formats: tuple[str, ...]  # of the rows that it trains on: the keys that they must have
    stored: tuple[str, ...]  # the token sequences that are kept of an item
    policy: tuple[str, ...]
    reference: tuple[str, ...] = ()  # empty: the loss has no reference model
    labels: bool = False  # each row says whether it is desirable
    cut: Literal["right", "left"]  # the side of a row that is too long
    lone_row: bool = True  # a step may have one row only
    orders: tuple[str, ...]  # allowed values of batch.order
    losses: tuple[str, ...] = ()  # allowed values of preference.loss; empty: no [preference] table is read
    best_by: tuple[str, ...] = (LOSS,)  # allowed values of train.best_by
    usual_learning_rates: tuple[float, float]  # with LoRA of usual sizes; below: no visible change, above: divergence
    defaults: Mapping[str, object] = field(default_factory=dict)  # by key, where they are not those of schema.py

    @property
    def branches(self) -> int:
        """The rows that a leaf holds of one item: 1, 2 for chosen and rejected, 3 with the chosen text beside them."""
        return len(self.policy)

    @property
    def prompt_apart(self) -> bool:
        """True when prompt and completion of a row are stored apart."""
        return "prompt" in self.stored

    @property
    def row_outputs(self) -> tuple[str, ...]:
        """The columns that a node sends back with a gradient."""
        return (LOSS, *self.policy, *self.reference)

    def scores(self, parameters: str) -> tuple[str, ...]:
        """The columns of a score under `parameters`: current, reference, or current+reference."""
        sides = {"current": self.policy, "reference": self.reference}
        return tuple(name for side in parameters.split("+") for name in sides[side])


SFT = MethodSpec(
    name="sft",
    item="row",
    weight="token",
    formats=("messages", "prompt, completion", "text"),
    stored=("row",),
    policy=("policy",),
    cut="right",
    orders=("sorted", "shuffled"),
    usual_learning_rates=(1e-5, 1e-3),
)

_PREFERENCE_DEFAULTS = {
    "batch.order": "shuffled",
    "train.learning_rate": 5e-5,
    "train.schedule": "cosine",
    "train.warmup_steps": "auto",
}

DPO = MethodSpec(
    name="dpo",
    item="pair",
    weight="pair",
    formats=PAIR_FORMATS,
    stored=("chosen", "rejected"),
    policy=("policy_chosen", "policy_rejected"),
    reference=("ref_chosen", "ref_rejected"),
    cut="left",
    orders=("shuffled",),
    losses=DPO_LOSSES,
    best_by=(LOSS, "rewards/accuracies", "rewards/margins"),
    usual_learning_rates=(5e-7, 2e-4),
    defaults=_PREFERENCE_DEFAULTS,
)

KTO = MethodSpec(
    name="kto",
    item="row",
    weight="row",
    formats=("prompt, completion, label",),
    stored=("prompt", "completion"),  # apart, because the reference point pairs the prompt of one row with another's
    policy=("policy",),
    reference=("ref",),
    labels=True,
    cut="left",
    lone_row=False,  # the reference point comes from the other rows of the step
    orders=("shuffled",),
    losses=KTO_LOSSES,
    best_by=(LOSS, "rewards/margins"),
    usual_learning_rates=(5e-7, 2e-4),
    defaults={**_PREFERENCE_DEFAULTS, "preference.loss": KTO_LOSSES[0]},
)

ORPO = MethodSpec(
    name="orpo",
    item="pair",
    weight="pair",
    formats=PAIR_FORMATS,
    stored=("chosen", "rejected", "text"),  # text: prompt and chosen answer, of which every token is a target
    policy=("policy_chosen", "policy_rejected", "policy_text"),
    cut="left",
    orders=("shuffled",),
    losses=ORPO_LOSSES,
    best_by=(LOSS, "rewards/accuracies", "rewards/margins"),
    usual_learning_rates=(1e-6, 1e-3),
    defaults={**_PREFERENCE_DEFAULTS, "preference.loss": ORPO_LOSSES[0]},
)

METHODS: Mapping[str, MethodSpec] = MappingProxyType({spec.name: spec for spec in (SFT, DPO, KTO, ORPO)})


def columns_of(names: Iterable[str], values: npt.NDArray[np.float32]) -> dict[str, Column]:
    """Returns the columns of row outputs [R, columns] by name. Raises ValueError unless there is a name for each."""
    return dict(zip(names, values.T, strict=True))


def named(applies: Callable[[MethodSpec], object]) -> str:
    """Returns the quoted names of the methods that `applies` is true for: '"dpo" and "kto"'. There is at least one."""
    *first, last = [f'"{spec.name}"' for spec in METHODS.values() if applies(spec)]
    return f"{', '.join(first)} and {last}" if first else last


def loss_fault(method: str, loss: str, label_smoothing: float = 0.0) -> tuple[str, str] | None:
    """Returns the key at fault and the sentence after it, for a loss that the method lacks; None when all is well."""
    allowed = METHODS[method].losses
    if loss in allowed:
        if not label_smoothing or loss in LABEL_SMOOTHING:
            return None
        smoothed = ", ".join(f'"{name}"' for name in DPO_LOSSES if name in LABEL_SMOOTHING)
        return "preference.label_smoothing", f'is for the losses {smoothed} of dpo, the loss is "{loss}": delete it'
    listed = ", ".join(f'"{name}"' for name in allowed)
    cure = f'"{method}" takes one of {listed}'
    if loss in REFUSED:
        return "preference.loss", f'is "{loss}", which is not supported: {REFUSED[loss]}; {cure}'
    for other in METHODS.values():
        if loss in other.losses:
            return "preference.loss", f'is "{loss}", which is for method "{other.name}"; {cure}'
    near = get_close_matches(loss, allowed, n=1)
    meant = f'; did you mean "{near[0]}"?' if near else ""
    return "preference.loss", f'is "{loss}", which is not a loss: {cure}{meant}'


def check_loss(method: str, loss: str) -> None:
    """Refuses a loss that is not one of the method's. Raises ConfigError with the fault and what is allowed."""
    if fault := loss_fault(method, loss):
        raise ConfigError(" ".join(fault))
