import json
import os
import subprocess
import sys
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxdist.node.selfcheck import models as models
from mlxdist.node.selfcheck import parts as selfcheck_parts
from mlxdist.node.selfcheck import selfcheck
from mlxdist.node.selfcheck.selfcheck import bit_classes, faults
from mlxdist.node.selfcheck.view import HEADER, lines, row

SAME = ["abcdef0123"] * 5


def found(**changes: Any) -> dict[str, Any]:
    """The measurements of a machine on which everything holds."""
    measured: dict[str, Any] = {
        "mlxdist": "0.1.0",
        "python": "3.12.1",
        "system": "Darwin 15.1",
        "machine": "arm64",
        "memory_bytes": 16 * 2**30,
        "usable_bytes": 10 * 2**30,
        "seconds": 60.0,
        "facts": {
            "versions": {"mlx": "0.32.4"},
            "device": "Device(gpu, 0)",
            "device_info": {"device_name": "Apple M4"},
        },
        "bits": {"dense": SAME, "MoE": SAME},
        "bits_again": {"dense": SAME, "MoE": SAME},
        "segments": {"dense": 0.0, "bf16": 1e-3},
        "gemm": {"relative_error": 3e-7, "gflops": 1200.0},
        "gemm_default": {"relative_error": 3e-4, "gflops": 2400.0},
        "speed": {"whole": {"tokens_per_second": 900.0, "peak_bytes": 10**8}},
        "heartbeats": {"evaluation_seconds": 3.0, "longest_gap_seconds": 0.1},
        "heartbeats_other_process_gap": 0.03,
        **changes,
    }
    measured["bit_classes"] = bit_classes(measured["bits"], measured["bits_again"])
    measured["faults"] = faults(measured)
    return measured


def test_a_machine_on_which_everything_holds_has_no_fault_and_a_row() -> None:
    measured = found()
    assert measured["faults"] == []
    assert measured["bit_classes"] == {"dense": "abcdef01", "MoE": "abcdef01"}
    text = "\n".join(lines(measured))
    assert "everything that a run relies on holds here" in text
    assert row(measured).startswith("| Apple M4 | Darwin 15.1 | 0.1.0 | 0.32.4 | 17 | abcdef01 |")


def test_bits_that_differ_are_counted_and_are_no_fault() -> None:
    shaky = ["a" * 10, "b" * 10, "a" * 10, "a" * 10, "a" * 10]
    measured = found(bits={"dense": SAME, "MoE": shaky}, bits_again={"dense": ["f" * 10] * 5, "MoE": shaky})
    assert measured["bit_classes"] == {"dense": "differs between processes", "MoE": "2 answers in 10"}
    assert measured["faults"] == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gemm": {"relative_error": 3e-4, "gflops": 1.0}}, "float32 products are off by 3.0e-04"),
        ({"gemm": {"relative_error": float("nan"), "gflops": 1.0}}, "float32 products are off by nan"),
        ({"segments": {"dense": 1e-3}}, "dense: the segmented gradient is off"),
        ({"segments": {"dense": {"error": "RuntimeError: no"}}}, "segments, dense: RuntimeError: no"),
        ({"speed": {"error": "ended with -6: Metal"}}, "speed: ended with -6: Metal"),
        ({"facts": {"error": "ended with 1: no mlx"}}, "facts: ended with 1: no mlx"),
        ({"bits": {"error": "no answer after 120 s"}}, "bits: no answer after 120 s"),
    ],
)
def test_what_a_run_relies_on_and_does_not_hold_is_a_fault(changes: dict[str, Any], said: str) -> None:
    measured = found(**changes)
    assert any(said in fault for fault in measured["faults"])
    assert "DOES NOT HOLD" in "\n".join(lines(measured))


def test_the_small_models_are_the_same_every_time() -> None:
    for case in models.CASES.values():
        one, two = (dict(tree_flatten(case.make().parameters())) for _ in range(2))
        assert one.keys() == two.keys()
        for name in one:
            assert mx.array_equal(one[name], two[name])


def test_every_small_model_trains_and_its_segments_agree() -> None:
    distances = selfcheck_parts.segments()
    assert distances.keys() == models.CASES.keys()
    for case, distance in distances.items():
        assert isinstance(distance, float), distance
        assert distance <= selfcheck.SEGMENTS_ERROR.get(case, selfcheck.SEGMENTS_ERROR_ELSE)


def test_a_part_that_crashes_is_a_sentence_and_ends_nothing() -> None:
    result, _ = selfcheck.part("no such part")
    assert result["error"].startswith("ended with 1: KeyError")


@pytest.mark.slow
def test_the_command_prints_one_json_object_and_this_machine_holds() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mlxdist", "selfcheck", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    measured = json.loads(done.stdout)
    assert (done.returncode, measured["faults"]) == (0, [])
    assert set(measured["bit_classes"]) == {"dense", "packed", "MoE", "4-bit", "bf16"}
    assert measured["gemm"]["relative_error"] < 1e-6
    assert len(HEADER.split("|")) == len(row(measured).split("|"))
