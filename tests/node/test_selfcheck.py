import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxdist.node.selfcheck import models, selfcheck
from mlxdist.node.selfcheck.compiled import compiled
from mlxdist.node.selfcheck.cross_entropy import cross_entropy
from mlxdist.node.selfcheck.devices import gradient_on, on_both_devices
from mlxdist.node.selfcheck.faults import OTHER_ORDER, ROUNDED, SAME_ORDER, faults
from mlxdist.node.selfcheck.forms import chunked, packed_rows
from mlxdist.node.selfcheck.gradients import Gradient
from mlxdist.node.selfcheck.parts import PARTS, segments
from mlxdist.node.selfcheck.rows import pairs_leaf, rows_leaf
from mlxdist.node.selfcheck.selfcheck import MEASUREMENTS, bit_classes
from mlxdist.node.selfcheck.training import beside_mlx_lm, padded, speed
from mlxdist.node.selfcheck.turns import Taken, compared
from mlxdist.node.selfcheck.view import header, lines, row

ROOT = Path(__file__).resolve().parents[2]
SAME = ["abcdef0123"] * 5
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 40}
RATIO = {"times_as_fast": 1.5, "share_of_memory": 0.5}
ERROR = {"loss": 1e-7, "gradient": 2e-6}
NO_TIME = 0.0  # the fewest rounds


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
        "part_seconds": {"facts": 1.0, "bits_again": 4.2},
        "facts": {
            "versions": {"mlx": "0.32.4"},
            "device": "Device(gpu, 0)",
            "device_info": {"device_name": "Apple M4", "max_recommended_working_set_size": 12 * 10**9},
        },
        "bits": {"dense": SAME, "MoE": SAME},
        "bits_again": {"dense": SAME, "MoE": SAME},
        "segments": {"dense": 0.0, "bf16": 1e-3},
        "devices": {"distances": {"dense": 2e-7, "MoE": 3e-6, "bf16": 8e-3}},
        "gemm": {"relative_error": 3e-7, "gflops": 1200.0},
        "gemm_default": {"relative_error": 3e-4, "gflops": 2400.0},
        "speed": {"whole": {"tokens_per_second": 900.0, "peak_bytes": 10**8}},
        "mlx_lm": {**RATIO, "losses": {"mlx-lm": [2.0, 1.9], "mlxdist": [2.0, 1.9]}},
        "packed": {"rows": {**RATIO, "distance": 1e-6}, "pairs": {**RATIO, "distance": 2e-6}},
        "chunked": {**RATIO, "distance": 3e-6},
        "cross_entropy": {"float32": {**RATIO, "errors": {"log-probs": ERROR, "mx.fast.cross_entropy": ERROR}}},
        "compiled": {
            **RATIO,
            "distance": 0.0,
            "same_bits": True,
            "building_seconds": 0.02,
            "compiling_seconds": 0.25,
        },
        "heartbeats": {"evaluation_seconds": 3.0, "longest_gap_seconds": 0.1},
        "heartbeats_other_process_gap": 0.03,
        **changes,
    }
    measured["bit_classes"] = bit_classes(measured["bits"], measured["bits_again"])
    measured["faults"] = faults(measured)
    return measured


TEXT = """\
mlxdist 0.1.0 selfcheck, 60 s
  Darwin 15.1 arm64, Python 3.12.1, mlx 0.32.4
  Apple M4, computing on Device(gpu, 0)
  17.2 GB of memory, of which a node may use 10.7 (the system recommends 12.0)
gradient of a leaf, five times in each of two processes
  dense  same bits, class abcdef01
  MoE    same bits, class abcdef01
the same gradient in two ways, relative distance
  in segments, on the whole graph   1.0e-03
  packed, each row alone            2.0e-06
  in chunks, token by token         3.0e-06
  on the GPU, on the CPU            3.0e-06
    dense   2.0e-07
    MoE     3.0e-06
    bf16    8.0e-03
float32 product: error 3.0e-07 as workers compute, 3.0e-04 by default, 1200 GFLOP/s
heartbeats during an evaluation of 3.0 s: longest gap 0.03 s beside it, 0.10 s in its process
training a small llama, whole: 900 tokens/s, 100 MB above the model
times as fast, both measured in turns (in brackets the memory, relative to the other)
  a training step, beside mlx-lm's trainer           1.50 (0.50)
  short rows packed, beside each row alone           1.50 (0.50)
  pairs packed, beside each row alone                1.50 (0.50)
  a hybrid model in chunks, beside token by token    1.50 (0.50)
mx.fast.cross_entropy, which mlxdist does not use, beside the log-probs of its head
  float32  1.50 (0.50) times as fast, errors (of ours): loss 1.0e-07 (1.0e-07), gradient 2.0e-06 (2.0e-06)
a leaf's gradient by mx.compile, which mlxdist does not use, beside a graph built each time
  1.50 (0.50) times as fast, same bits; 20 ms to build, 0.2 s to compile
seconds: facts 1, bits again 4

Please send the next line: paste it into an issue of the project, titled selfcheck. It becomes a row of the table in \
docs/hardware.md and holds no names or paths.

| Apple M4 | Darwin 15.1 | 0.1.0 | 0.32.4 | 17 | abcdef01 | ? | abcdef01 | ? | ? | 3.0e-07 (3.0e-04) | 1200 | 1.0e-03 \
| 3.0e-06 | 0.03 | 900, ? | 1.50 | 1.50, 1.50 | 1.50 | 1.50, ? | 1.50, same bits, 0.2 s |

everything that a run relies on holds here"""


def test_a_machine_on_which_everything_holds_has_no_fault_and_a_line_to_send() -> None:
    measured = found()
    assert measured["faults"] == []
    assert measured["bit_classes"] == {"dense": "abcdef01", "MoE": "abcdef01"}
    assert "\n".join(lines(measured)) == TEXT


def test_the_line_to_send_is_a_row_of_the_table_in_the_docs() -> None:
    page = (ROOT / "docs/hardware.md").read_text(encoding="utf-8").splitlines()
    assert header() in page
    assert len(row(found()).split("|")) == len(header().split("|"))


def test_a_machine_where_every_part_failed_still_has_a_text_and_a_row() -> None:
    failed = {each.key: {"error": "ended with -6"} for each in MEASUREMENTS}
    measured = found(**failed)
    assert len(measured["faults"]) == len(MEASUREMENTS)
    text = "\n".join(lines(measured))
    assert all(f"DOES NOT HOLD: {each.key}: ended with -6" in text for each in MEASUREMENTS)
    assert len(row(measured).split("|")) == len(header().split("|"))


def test_a_machine_without_a_gpu_says_so_in_place_of_comparing_its_cpu_with_itself() -> None:
    never: Any = None  # would fail when called
    assert on_both_devices(never, gpu=False) == {"distances": {}}
    measured = found(devices={"distances": {}})
    assert measured["faults"] == []
    assert "not compared, as MLX has no GPU here" in "\n".join(lines(measured))
    assert "| no GPU |" in row(measured)


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
        ({"devices": {"distances": {"dense": 2e-4}}}, "dense: the GPU's gradient, compared with the CPU's, is off by"),
        ({"devices": {"distances": {"dense": float("inf")}}}, "dense: the GPU's gradient"),
        ({"devices": {"distances": {"MoE": {"error": "RuntimeError: no"}}}}, "devices, MoE: RuntimeError: no"),
        ({"packed": {"pairs": {**RATIO, "distance": 1e-3}}}, "pairs: the gradient of packed rows"),
        ({"chunked": {**RATIO, "distance": 1e-3}}, "hybrid: the gradient of gated-delta layers in chunks is off"),
        ({"mlx_lm": {**RATIO, "losses": {"mlx-lm": [2.0], "mlxdist": [2.01]}}}, "the same steps have another loss"),
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
    distances = segments()
    assert distances.keys() == models.CASES.keys()
    for case, distance in distances.items():
        assert isinstance(distance, float), distance
        assert distance <= ROUNDED.get(case, SAME_ORDER)


def test_a_wrong_kernel_of_the_gpu_is_seen() -> None:
    def with_a_wrong_kernel(case: models.Case, device: mx.DeviceType) -> Gradient:
        right = gradient_on(case, mx.cpu)
        if device == mx.cpu:
            return right
        last = max(right)
        return {**right, last: right[last] * 1.01}

    cases = {name: models.CASES[name] for name in ("dense", "packed")}
    assert on_both_devices(lambda case, _: gradient_on(case, mx.cpu), cases, gpu=True)["distances"] == {
        "dense": 0.0,
        "packed": 0.0,
    }
    measured = found(devices=on_both_devices(with_a_wrong_kernel, cases, gpu=True))
    assert [fault.split(":")[0] for fault in measured["faults"]] == ["dense", "packed"]


def test_a_kernel_that_a_device_lacks_does_not_stop_the_other_cases() -> None:
    def lacking(case: models.Case, device: mx.DeviceType) -> Gradient:
        if device == mx.gpu and case is models.CASES["packed"]:
            raise RuntimeError("no such kernel")
        return {"row sums": mx.array([1.0])}

    def infinite(case: models.Case, device: mx.DeviceType) -> Gradient:
        return {"row sums": mx.array([float("inf") if device == mx.gpu else 1.0])}

    told = on_both_devices(infinite, {"dense": models.CASES["dense"]}, gpu=True)
    assert "NaN, Inf" in told["distances"]["dense"]["error"]
    distances = on_both_devices(lacking, {name: models.CASES[name] for name in ("packed", "dense")}, gpu=True)
    assert distances == {"distances": {"packed": {"error": "RuntimeError: no such kernel"}, "dense": 0.0}}


def test_the_larger_cases_train_on_the_cpu() -> None:
    for case in models.LARGER.values():
        gradient = gradient_on(case, mx.cpu)
        assert all(mx.isfinite(value).all().item() for value in gradient.values())


@pytest.mark.slow
def test_mlx_lm_and_a_node_train_the_same_losses_in_turns() -> None:
    compared_steps = beside_mlx_lm(NO_TIME, SIZES, [39, 43, 50])
    theirs, ours = compared_steps["losses"].values()
    assert len(theirs) == len(ours) == compared_steps["rounds"] + 1  # the first one, which compiles, does not count
    assert theirs == pytest.approx(ours, rel=1e-5)
    assert ours[-1] < ours[0]
    assert found(mlx_lm=compared_steps)["faults"] == []


def test_a_batch_of_mlx_lm_has_the_tokens_and_the_targets_of_the_leaf() -> None:
    leaf = rows_leaf([7, 40], 50, prompt=3)
    ids, targets = padded(leaf)
    assert ids.shape == (2, 65)  # mlx-lm's own rule: the next multiple of 32, and one more
    for place, each in enumerate(leaf.rows):
        assert ids[place, : len(each.ids)].tolist() == each.ids.tolist()
        first, last = (int(end) for end in targets[place].tolist())  # type: ignore[union-attr, arg-type]
        assert list(range(first, last + 1)) == each.targets.nonzero()[0].tolist()


def test_packed_rows_are_measured_beside_each_row_alone_and_have_the_same_gradient() -> None:
    both = packed_rows(NO_TIME, SIZES, (9, 12), (2, 10, 6))
    assert both.keys() == {"rows", "pairs"}
    assert all(each["distance"] <= OTHER_ORDER and each["times_as_fast"] > 0 for each in both.values())


def test_chunks_are_measured_beside_token_by_token_and_have_the_same_gradient() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16}
    measured = chunked(NO_TIME, sizes, 70)
    assert set(measured["sides"]) == {"token by token", "in chunks"}
    assert measured["distance"] <= OTHER_ORDER


def test_cross_entropy_is_measured_in_two_types_against_float64() -> None:
    measured = cross_entropy(NO_TIME, 8, 64)
    assert measured.keys() == {"float32", "bfloat16"}
    assert all(max(errors.values()) < 1e-5 for errors in measured["float32"]["errors"].values())
    assert all(errors["gradient"] < 1e-2 for errors in measured["bfloat16"]["errors"].values())
    assert measured["bfloat16"]["errors"]["log-probs"]["loss"] < 1e-5  # our log-probs are computed in float32


def test_a_compiled_gradient_is_measured_beside_one_that_is_built_and_has_its_values() -> None:
    measured = compiled(NO_TIME, SIZES, (9, 12))
    if "reason" not in measured:  # a machine without a compiler
        assert set(measured["sides"]) == {"built", "compiled"}
        assert measured["distance"] <= SAME_ORDER
        assert measured["same_bits"] is (measured["distance"] == 0.0)


def test_a_machine_that_cannot_compile_says_why_and_has_no_fault() -> None:
    measured = found(compiled={"reason": "RuntimeError: g++ not found"})
    assert measured["faults"] == []
    assert "  RuntimeError: g++ not found" in lines(measured)
    assert "| ?, ?, ? s |" in row(measured)


def test_the_speed_has_the_whole_graph_and_segments() -> None:
    measured = speed(NO_TIME, SIZES, 24)
    assert measured.keys() == {"whole", "segment 1"}
    assert all(each["tokens_per_second"] > 0 for each in measured.values())


def test_a_comparison_takes_medians_of_rounds_and_the_largest_peaks() -> None:
    slow, fast = Taken(6.0, 3.0, 400), Taken(2.0, 1.0, 100)
    disturbed = replace(fast, seconds=50.0)
    result = compared(("a", "b"), [(slow, fast), (slow, disturbed), (slow, fast)])
    assert (result["times_as_fast"], result["in_processor_time"], result["share_of_memory"]) == (3.0, 3.0, 0.25)
    assert result["sides"]["b"] == {"seconds": 2.0, "processor_seconds": 1.0, "peak_bytes": 100}


def test_a_pair_shares_its_prompt_and_no_more() -> None:
    leaf = pairs_leaf(3, 10, 4, 50)
    assert leaf.shared == [0, 10, 0, 10, 0, 10]
    assert leaf.tokens == 3 * (10 + 4 + 4)


def test_a_part_that_crashes_is_a_sentence_and_ends_nothing() -> None:
    result, _ = selfcheck.part("no such part")
    assert result["error"].startswith("ended with 1: KeyError")


def test_every_measurement_is_a_part() -> None:
    assert {each.part or each.key for each in MEASUREMENTS} == set(PARTS)


@pytest.mark.slow
def test_all_parts_run_in_processes_of_their_own_and_this_machine_holds() -> None:
    said: list[str] = []
    measured = selfcheck.measure(said.append, share=0.0)
    assert measured["faults"] == []
    assert len(said) == len(MEASUREMENTS) == len(measured["part_seconds"])
    assert set(measured["bit_classes"]) == {"dense", "packed", "MoE", "4-bit", "bf16"}
    assert measured["gemm"]["relative_error"] < 1e-6
    assert measured["chunked"]["distance"] <= OTHER_ORDER
    assert json.loads(json.dumps(measured)) == measured
    *cells, made_once, _ = row(measured).split("|")  # on Linux MLX compiles with g++, which may be absent
    assert "?" not in "".join(cells)
    assert made_once
