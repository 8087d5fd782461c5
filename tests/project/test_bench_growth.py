"""scripts/bench_growth.py works on a fresh machine and finds a square where there is one. Its times are not tested."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench_growth import exponent

ROOT = Path(__file__).resolve().parents[2]
SIZES = [64 << place for place in range(8)]


@pytest.mark.parametrize("power", [0, 1, 2])
def test_the_exponent_is_that_of_the_power_law_beside_a_cost_that_does_not_grow(power: int) -> None:
    assert exponent(SIZES, [size**power + 1e-6 for size in SIZES]) == pytest.approx(power, abs=0.01)
    assert exponent(SIZES, [30 + size for size in SIZES]) == pytest.approx(1, abs=0.05)


def test_values_that_are_not_above_zero_have_no_exponent() -> None:
    assert exponent([1, 2, 4], [1.0, 0.0, 3.0]) is None
    assert exponent([1, 2], [1.0, 3.0]) is None


@pytest.mark.slow
def test_every_work_is_measured_at_every_size() -> None:
    command = [sys.executable, "-m", "scripts.bench_growth", "--least", "64", "--most", "256", "--seconds", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)  # stdout has nothing else
    assert len(result["works"]) == 20
    for work in result["works"].values():
        assert work["sizes"] == [64, 128, 256]
        assert len(work["processor_seconds"]) == len(work["peak_mb"]) == 3
        assert all(seconds > 0 for seconds in work["clock_seconds"])
