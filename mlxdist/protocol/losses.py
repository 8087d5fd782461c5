"""The names of the losses: those trained here, and those refused with the reason.

The formulas stand in `mlxdist.protocol.objectives`; here is no mlx, so that reading a configuration needs none. Names
are TRL's.
"""

from difflib import get_close_matches

from mlxdist.protocol.errors import ConfigError

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
LOSSES = {"dpo": DPO_LOSSES, "kto": KTO_LOSSES}

# Their log-probabilities enter as means over a row's targets; those of all others as sums.
PER_TOKEN_MEAN = frozenset({"ipo"})
LABEL_SMOOTHING = frozenset({"sigmoid", "robust", "exo_pair"})
# KTO's losses that need the first round over the KL pairs; for the others z0 is 0.
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
    "orpo": _NO_REFERENCE,
    "simpo": _NO_REFERENCE,
}


def loss_fault(method: str, loss: str, label_smoothing: float = 0.0) -> tuple[str, str] | None:
    """What cannot be trained as asked: the key at fault and the sentence after it. None when all is well.

    `method` is "dpo" or "kto".
    """
    allowed = LOSSES[method]
    listed = ", ".join(f'"{name}"' for name in allowed)
    if loss in allowed:
        if not label_smoothing or loss in LABEL_SMOOTHING:
            return None
        smoothed = ", ".join(f'"{name}"' for name in DPO_LOSSES if name in LABEL_SMOOTHING)
        return "preference.label_smoothing", f'is for the losses {smoothed} of dpo, the loss is "{loss}": delete it'
    cure = f'"{method}" takes one of {listed}'
    if loss in REFUSED:
        return "preference.loss", f'is "{loss}", which is not supported: {REFUSED[loss]}; {cure}'
    for other, names in LOSSES.items():
        if loss in names:
            return "preference.loss", f'is "{loss}", which is for method "{other}"; {cure}'
    near = get_close_matches(loss, allowed, n=1)
    meant = f'; did you mean "{near[0]}"?' if near else ""
    return "preference.loss", f'is "{loss}", which is no loss: {cure}{meant}'


def check_loss(method: str, loss: str) -> None:
    """Reject a loss that is not one of the method's. Raises ConfigError with what is wrong and what is allowed."""
    if fault := loss_fault(method, loss):
        raise ConfigError(" ".join(fault))
