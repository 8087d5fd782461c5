"""The objectives: log-probabilities of rows in, one loss for each row or pair out. Sums and divisions are elsewhere.

A log-probability is that of a whole row: the sum over its targets of log softmax(logits)[target], float32. Shapes: B
rows or pairs. Only the policy's are variables, all others are constants. The formulas are those of TRL 0.23.1, in forms
that neither overflow nor cancel: 1 - s(x) is written s(-x), and s(x) is exp(log s(x)), whose gradient is exact on both
sides.
"""

import math
from collections.abc import Callable, Mapping

import mlx.core as mx
import numpy as np

from mlxdist.protocol.errors import NonFiniteError
from mlxdist.protocol.losses import REFERENCE_POINT
from mlxdist.protocol.methods import DPO, KTO, LABELS, ORPO, SFT, Column, check_loss

Scalars = Mapping[str, float]  # the values of a loss that hold for a whole step, by name
RowLoss = Callable[[str, Mapping[str, mx.array], Scalars], mx.array]
PairLoss = Callable[[mx.array, mx.array, float, float], mx.array]

LEAST_DOUBT = 1e-6  # nats: a mean log-prob nearer to 0 than this has no finite odds in float32
DISCOPOP_TAU = 0.05  # the temperature in Eq. 5 of https://arxiv.org/abs/2406.08414
EXO_SMOOTHING = 1e-3  # EXO takes log(label_smoothing); 0 stands for this, as in TRL


def log_sigmoid(x: mx.array) -> mx.array:
    """Returns log(1 / (1 + exp(-x))), finite for every finite x."""
    return -mx.logaddexp(mx.array(0.0, dtype=x.dtype), -x)


def sigmoid(x: mx.array) -> mx.array:
    """Returns 1 / (1 + exp(-x)), with a gradient that is exact to float32 even where the value is near 1."""
    return mx.exp(log_sigmoid(x))


def row_losses(method: str, loss: str, columns: Mapping[str, mx.array], scalars: Scalars) -> mx.array:
    """Returns the loss of each row or pair [B] of a method.

    `columns` holds the policy's and the reference's log-probabilities as the loss sees them, and the labels, [B] each,
    under the names of the method's MethodSpec.
    """
    return _METHODS[method](loss, columns, scalars)


def sft_losses(policy: mx.array) -> mx.array:
    """Returns the cross-entropy of each row [B], summed over its targets. `policy` [B]: log-probabilities.

    Weight: targets.
    """
    return -policy


def dpo_losses(
    policy_chosen: mx.array,
    policy_rejected: mx.array,
    ref_chosen: mx.array,
    ref_rejected: mx.array,
    *,
    loss: str,
    beta: float,
    label_smoothing: float = 0.0,
) -> mx.array:
    """Returns the loss of each pair [B] from the log-probabilities of policy and reference, each [B]. Weight: pairs.

    `loss` is one of `losses.DPO_LOSSES`; for those of `losses.PER_TOKEN_MEAN` the caller passes means over the row's
    targets, not sums. Only those of `losses.LABEL_SMOOTHING` read `label_smoothing`. Raises ConfigError for another
    name.
    """
    formula = _DPO.get(loss)
    if formula is None:
        check_loss(DPO.name, loss)
        raise AssertionError(f"{loss} is listed without a formula")
    return formula(policy_chosen - ref_chosen, policy_rejected - ref_rejected, beta, label_smoothing)


def kto_losses(
    policy: mx.array,
    ref: mx.array,
    labels: mx.array,
    reference_point: float,
    *,
    loss: str,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> mx.array:
    """Returns the loss of each row [B]: Eq. 7 of https://arxiv.org/abs/2402.01306. Weight: rows.

    `policy`, `ref` [B]: log-probabilities; `labels` [B]: true where desirable; `reference_point`: z0 of the whole
    global batch, a constant, which `apo_zero_unpaired` (https://arxiv.org/abs/2408.06266) replaces by 0.
    Raises ConfigError for a loss that is not one of `losses.KTO_LOSSES`.
    """
    check_loss(KTO.name, loss)
    z0 = reference_point if loss in REFERENCE_POINT else 0.0
    excess = beta * (policy - ref - z0)
    desirable = labels.astype(mx.bool_)
    # 1 - s(b(r - z0)) where desirable, 1 - s(b(z0 - r)) where not
    value = sigmoid(mx.where(desirable, -excess, excess))
    return mx.where(desirable, desirable_weight, undesirable_weight).astype(value.dtype) * value


def reference_point(policy_kl: Column, ref_kl: Column) -> float:
    """Returns KTO's z0 in nats: max(0, mean of policy - reference over the KL pairs of the whole global batch).

    `policy_kl`, `ref_kl` [R]: log-probabilities of every KL pair of the step, in row order. Summed by `math.fsum`, so
    that no cut of the batch changes it. Raises ValueError for no rows or unequal counts, and NonFiniteError naming the
    rows that are NaN or infinite.
    """
    if len(policy_kl) != len(ref_kl) or not len(policy_kl):
        raise ValueError(f"a reference point needs rows of both: {len(policy_kl)} of the policy, {len(ref_kl)} of ref")
    ratios = np.asarray(policy_kl, dtype=np.float64) - np.asarray(ref_kl, dtype=np.float64)
    faulty = np.flatnonzero(~np.isfinite(ratios))
    if len(faulty):
        # max(0, nan) is 0 in Python: a broken model would pass for one at its reference
        rows = ", ".join(str(row) for row in faulty[:8])
        raise NonFiniteError(f"The log-probability of KTO's KL pair of row {rows} of the step is not finite.")
    return max(0.0, math.fsum(ratios) / len(ratios))


# Each takes the log-ratios c = logp_c - ref_c and r = logp_r - ref_r [B], beta, and the label smoothing e.


def _sigmoid(c: mx.array, r: mx.array, beta: float, e: float) -> mx.array:
    """Eq. 7 of https://arxiv.org/abs/2305.18290; with e > 0 conservative DPO (https://ericmitchell.ai/cdpo.pdf)."""
    x = beta * (c - r)
    return -(1 - e) * log_sigmoid(x) - e * log_sigmoid(-x)


def _hinge(c: mx.array, r: mx.array, beta: float, e: float) -> mx.array:
    """SLiC's hinge (https://arxiv.org/abs/2305.10425) on DPO's margin, as https://arxiv.org/abs/2309.06657 has it."""
    return mx.maximum(1 - beta * (c - r), 0.0)


def _ipo(c: mx.array, r: mx.array, beta: float, e: float) -> mx.array:
    """Eq. 17 of https://arxiv.org/abs/2310.12036, on means over the targets; beta is its tau."""
    return mx.square((c - r) - 1 / (2 * beta))


def _robust(c: mx.array, r: mx.array, beta: float, e: float) -> mx.array:
    """Robust DPO, https://arxiv.org/abs/2403.00409: unbiased when a share e of the labels is swapped."""
    x = beta * (c - r)
    return (-(1 - e) * log_sigmoid(x) + e * log_sigmoid(-x)) / (1 - 2 * e)


def _apo_zero(c: mx.array, r: mx.array, beta: float, e: float) -> mx.array:
    """Eq. 7 of https://arxiv.org/abs/2408.06266: chosen up, rejected down."""
    return sigmoid(-beta * c) + sigmoid(beta * r)


def _apo_down(c: mx.array, r: mx.array, beta: float, e: float) -> mx.array:
    """Eq. 8 of https://arxiv.org/abs/2408.06266: both down, rejected more."""
    return sigmoid(beta * c) + sigmoid(-beta * (c - r))


def _exo_pair(c: mx.array, r: mx.array, beta: float, e: float) -> mx.array:
    """Eq. 16 of https://arxiv.org/abs/2402.00856: the reverse KL to the smoothed preference."""
    x = beta * (c - r)
    e = e or EXO_SMOOTHING
    return sigmoid(x) * (log_sigmoid(x) - math.log1p(-e)) + sigmoid(-x) * (log_sigmoid(-x) - math.log(e))


def _nca_pair(c: mx.array, r: mx.array, beta: float, e: float) -> mx.array:
    """NCA for pairs, https://arxiv.org/abs/2402.05369."""
    return -log_sigmoid(beta * c) - 0.5 * log_sigmoid(-beta * c) - 0.5 * log_sigmoid(-beta * r)


def _sppo_hard(c: mx.array, r: mx.array, beta: float, e: float) -> mx.array:
    """Eq. 4.7 of https://arxiv.org/abs/2405.00675 with win probabilities 1 and 0."""
    return mx.square(c - 0.5 / beta) + mx.square(r + 0.5 / beta)


def _discopop(c: mx.array, r: mx.array, beta: float, e: float) -> mx.array:
    """Log-ratio modulated loss, Eq. 5 of https://arxiv.org/abs/2406.08414: exponential where x > 0, logistic below."""
    x = beta * (c - r)
    gate = x / DISCOPOP_TAU
    # exp(-x) s(gate) in one exponential: as two factors it is inf * 0 for a pair that is far off
    return -log_sigmoid(x) * sigmoid(-gate) + mx.exp(log_sigmoid(gate) - x)


_DPO: dict[str, PairLoss] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "robust": _robust,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "sppo_hard": _sppo_hard,
    "discopop": _discopop,
}


def orpo_losses(
    policy_chosen: mx.array, policy_rejected: mx.array, policy_text: mx.array, *, beta: float, text_weight: float
) -> mx.array:
    """Returns ORPO's loss of each pair [B]: Eq. 6 of https://arxiv.org/abs/2403.07691, as TRL has it. Weight: pairs.

    `policy_chosen` and `policy_rejected` are means over the answer's targets, `policy_text` the sum over all tokens of
    prompt and chosen answer. TRL divides the cross-entropy of the texts by all of their tokens and the rest by the
    pairs; so `text_weight` is the pairs of the step over its tokens of text, and one division serves both.
    """
    return -text_weight * policy_text - beta * log_sigmoid(log_odds_ratio(policy_chosen, policy_rejected))


def log_odds_ratio(chosen: mx.array, rejected: mx.array) -> mx.array:
    """Returns log(odds(chosen) / odds(rejected)) [B], where odds are p / (1 - p), from mean log-probs below 0."""
    return (chosen - rejected) - (_log_of_rest(chosen) - _log_of_rest(rejected))


def _log_of_rest(logp: mx.array) -> mx.array:
    """Returns log(1 - exp(logp)), exact on both sides."""
    logp = mx.minimum(logp, -LEAST_DOUBT)
    return mx.where(logp > -math.log(2), mx.log(-mx.expm1(logp)), mx.log1p(-mx.exp(logp)))


def _sft_columns(loss: str, columns: Mapping[str, mx.array], scalars: Scalars) -> mx.array:
    return sft_losses(columns["policy"])


def _dpo_columns(loss: str, columns: Mapping[str, mx.array], scalars: Scalars) -> mx.array:
    return dpo_losses(
        *(columns[name] for name in (*DPO.policy, *DPO.reference)),
        loss=loss,
        beta=scalars["beta"],
        label_smoothing=scalars["label_smoothing"],
    )


def _kto_columns(loss: str, columns: Mapping[str, mx.array], scalars: Scalars) -> mx.array:
    return kto_losses(
        columns["policy"],
        columns["ref"],
        columns[LABELS],
        scalars["reference_point"],
        loss=loss,
        beta=scalars["beta"],
        desirable_weight=scalars["desirable_weight"],
        undesirable_weight=scalars["undesirable_weight"],
    )


def _orpo_columns(loss: str, columns: Mapping[str, mx.array], scalars: Scalars) -> mx.array:
    policy = (columns[name] for name in ORPO.policy)
    return orpo_losses(*policy, beta=scalars["beta"], text_weight=scalars["text_weight"])


_METHODS: dict[str, RowLoss] = {
    SFT.name: _sft_columns,
    DPO.name: _dpo_columns,
    KTO.name: _kto_columns,
    ORPO.name: _orpo_columns,
}
