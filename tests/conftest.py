"""What must be set before any test imports mlx, and what the marker `mac` does."""

import os
import sys

import pytest
from hypothesis import settings

from mlxdist.node.blas import use_openblas

# One thread and no TF32: with more threads, or with TF32, the same sum has other bits.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MLX_ENABLE_TF32"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"  # a test reads folders only
use_openblas()

# A slow machine is no failure, and in CI the same commit gets the same cases.
settings.register_profile("mlxdist", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("mlxdist")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs macOS on other systems."""
    if sys.platform != "darwin" and item.get_closest_marker("mac") is not None:
        pytest.skip("needs macOS")
