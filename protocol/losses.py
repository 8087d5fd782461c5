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


def check_loss(method: str, loss: str, label_smoothing: float = 0.0) -> None:
    """Refuse a preference loss that cannot be trained as asked.

    `method` is "dpo" or "kto". Raises ConfigError naming the key, the reason and what is allowed.
    """
    allowed = LOSSES[method]
    choice = f'preference.loss = "{loss}"'
    listed = ", ".join(allowed)
    if loss not in allowed:
        for other, names in LOSSES.items():
            if loss in names:
                raise ConfigError(
                    f'{choice} belongs to method = "{other}"; this run has method = "{method}". Use one of {listed}.'
                )
        if loss in REFUSED:
            raise ConfigError(f"{choice} is not supported: {REFUSED[loss]}. For {method}, use one of {listed}.")
        near = get_close_matches(loss, allowed, n=1)
        hint = f' Did you mean "{near[0]}"?' if near else ""
        raise ConfigError(f"{choice} is not a loss.{hint} For {method}, use one of {listed}.")
    if not 0.0 <= label_smoothing < 0.5:
        raise ConfigError(
            f"preference.label_smoothing = {label_smoothing:g} is out of range: it is the share of pairs whose labels "
            "are swapped, from 0 up to, not including, 0.5."
        )
    if label_smoothing > 0.0 and loss not in LABEL_SMOOTHING:
        smoothed = ", ".join(name for name in DPO_LOSSES if name in LABEL_SMOOTHING)
        raise ConfigError(
            f"preference.label_smoothing = {label_smoothing:g} has no meaning with {choice}. Set it to 0; the losses "
            f"that read it are DPO's {smoothed}."
        )
