"""The gradient of a leaf on the GPU beside the same one on the CPU: a wrong kernel of Metal shows here."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from mlxdist.node.backward.comparison import distance, in_short
from mlxdist.node.selfcheck import models
from mlxdist.node.selfcheck.gradients import TOGETHER, Gradient, leaf_gradient
from mlxdist.node.selfcheck.models import Case
from mlxdist.node.work.objective import passes

Compute = Callable[[Case, mx.DeviceType], Gradient]  # the gradient of a case on a device

CASES: Mapping[str, Case] = MappingProxyType({**models.CASES, **models.LARGER})


def gradient_on(case: Case, device: mx.DeviceType) -> Gradient:
    """Returns the gradient of a case, with all of its operations on one device."""
    with mx.stream(device):
        return leaf_gradient(case.make(), passes(case.leaf(), TOGETHER), case.path)


def on_both_devices(
    compute: Compute = gradient_on, cases: Mapping[str, Case] = CASES, gpu: bool | None = None
) -> dict[str, Any]:
    """Returns the distance of the GPU's gradient from the CPU's, relative to the latter.

    Args:
        compute: returns the gradient of a case on a device.
        cases: that are compared.
        gpu: MLX has one here; None: as MLX says.

    Returns:
        "distances": by case, or an error. Without a GPU there are none: a CPU is not compared with itself.
    """
    there = mx.is_available(mx.gpu) if gpu is None else gpu
    return {"distances": {name: _away(compute, case) for name, case in cases.items()} if there else {}}


def _away(compute: Compute, case: Case) -> Any:
    try:
        away = distance(compute(case, mx.cpu), compute(case, mx.gpu))
        return away if math.isfinite(away) else {"error": "NaN, Inf or other tensors on one of the devices"}
    except Exception as error:  # a kernel may be missing on one device; the other cases go on
        return {"error": in_short(error)}
