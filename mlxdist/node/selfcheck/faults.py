"""The parts of a self-check that a run relies on and that do not hold on this machine, as sentences.

Different bits are no fault: such a run promises a tolerance. Neither is a form that is slower here.
"""

from collections.abc import Iterator, Mapping
from typing import Any

GEMM_ERROR = 1e-5  # above it a float32 product was computed with fewer bits: TF32 gives 3e-4, float32 3e-7
SAME_ORDER = 1e-5  # largest relative distance of two gradients whose sums are taken in nearly the same order
OTHER_ORDER = 1e-4  # the same in another order, or with the kernels of another device
ROUNDED = {"bf16": 2e-2}  # both, by case, of models whose parameters have fewer bits
LOSSES = 1e-4  # relative distance of our loss from mlx-lm's, summed over the steps of both


def faults(found: Mapping[str, Any]) -> list[str]:
    """Returns the sentences; none when everything holds."""
    said = [
        f"{name}: {value['error']}" for name, value in found.items() if isinstance(value, dict) and "error" in value
    ]
    cases = {
        "bits": found["bits"],
        "segments": found["segments"],
        "devices": found["devices"].get("distances", {}),
    }
    for name, each in cases.items():
        said += [f"{name}, {case}: {value['error']}" for case, value in each.items() if isinstance(value, dict)]
    error = found["gemm"].get("relative_error", 0.0)
    if not error <= GEMM_ERROR:
        said.append(f"float32 products are off by {error:.1e} although MLX_ENABLE_TF32 is 0")
    said += _too_far("the segmented gradient", cases["segments"], SAME_ORDER)
    said += _too_far("the GPU's gradient, compared with the CPU's,", cases["devices"], OTHER_ORDER)
    packed = {name: value["distance"] for name, value in found["packed"].items() if "distance" in value}
    said += _too_far("the gradient of packed rows, compared with that of each row alone,", packed, OTHER_ORDER)
    if "distance" in found["chunked"]:
        chunked = {"hybrid": found["chunked"]["distance"]}
        said += _too_far("the gradient of gated-delta layers in chunks", chunked, OTHER_ORDER)
    if "losses" in found["mlx_lm"]:
        theirs, ours = (sum(each) for each in zip(*zip(*found["mlx_lm"]["losses"].values(), strict=False), strict=True))
        if not abs(ours / theirs - 1) <= LOSSES:
            said.append(f"beside mlx-lm: the same steps have another loss ({ours:.6g} in place of {theirs:.6g})")
    return said


def _too_far(what: str, distances: Mapping[str, Any], otherwise: float) -> Iterator[str]:
    for case, distance in distances.items():
        limit = ROUNDED.get(case, otherwise)
        if isinstance(distance, float) and not distance <= limit:
            yield f"{case}: {what} is off by {distance:.1e}, more than {limit:.0e}"
