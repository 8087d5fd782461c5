"""The names of the preference losses: those that can be trained, and those that are refused, with the reason.

The names are TRL's. The formulas are in `objectives`. There is no mlx here, so that reading a configuration needs none.
"""

from collections.abc import Mapping
from types import MappingProxyType

DPO_LOSSES = (
    "sigmoid",
    "hinge",
    "ipo",
    "robust",
    "apo_zero",
    "apo_down",
    "exo_pair",
    "nca_pair",
    "sppo_hard",
    "discopop",
)
KTO_LOSSES = ("kto", "apo_zero_unpaired")

ORPO_LOSSES = ("orpo",)

# These take the mean of a row's log-probabilities over its targets in so many branches; all else takes the sum.
PER_TOKEN_MEAN: Mapping[str, int] = MappingProxyType({"ipo": 2, "orpo": 2})
LABEL_SMOOTHING = frozenset({"sigmoid", "robust", "exo_pair"})
# KTO's losses that need the round over the KL pairs; for the others the reference point is 0.
REFERENCE_POINT = frozenset({"kto"})

_RUNNING_MEAN = (
    "it shifts every reward by a running mean over the steps before, so that a step is no function of its global batch"
)
_SORTED = "it sorts the log-ratios of the whole batch against each other, so that it is no sum over pairs"
_NO_REFERENCE = "it has no reference model and is another method than DPO and KTO"

REFUSED = {
    "aot": _SORTED,
    "aot_pair": _SORTED,
    "aot_unpaired": _SORTED,
    "bco_pair": _RUNNING_MEAN,
    "bco": _RUNNING_MEAN,
    "kto_pair": 'TRL gave it up for unpaired KTO: set method = "kto" and data.unpair = true',
    "sft": 'it is a method of its own: set method = "sft"',
    "cpo": _NO_REFERENCE,
    "simpo": _NO_REFERENCE,
}
