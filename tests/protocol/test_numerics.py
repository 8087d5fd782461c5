"""All that fixes the bits has one id, dropout has its keys, and the promise says no more than the canary showed."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from mlxdist.coordinator.config.load import load_config
from mlxdist.coordinator.config.run_spec import run_spec
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol import messages as m
from mlxdist.protocol import numerics
from mlxdist.protocol.messages import RunSpec
from mlxdist.protocol.numerics import Promise, canary_adapter, canary_leaf, dropout_key, numerics_id, promise
from mlxdist.protocol.wire import decode, encode
from tests.coordinator.config.run_files import run_file
from tests.protocol.example_messages import example

SPEC: RunSpec = example(RunSpec)
# The same files may lie elsewhere on another node; the model's own hash is compared when it is loaded.
FREE = {"model": "elsewhere", "numerics_id": "another", "packing": "apart", "largest_leaf": 9}


def other(value: Any) -> Any:
    """Another value of the same type."""
    match value:
        case str():
            return value + "x"
        case int():
            return value + 1
        case float():
            return value * 2
        case tuple():
            return value[1:]
        case dict():
            return {key: other(one) for key, one in value.items()}
    raise TypeError(type(value))


# ---- numerics_id


@pytest.mark.parametrize("name", sorted(set(RunSpec.__struct_fields__) - FREE.keys()))
def test_the_id_changes_with_every_field_that_fixes_bits(name: str) -> None:
    changed = msgspec.structs.replace(SPEC, **{name: other(getattr(SPEC, name))})
    assert numerics_id(changed) != numerics_id(SPEC)


def test_the_id_changes_with_every_one_of_the_fixed_values() -> None:
    fixed: dict[str, str | int | float] = {"order": "sorted", "batch": 8, "eps": 1e-8}
    variants = [fixed, *({**fixed, key: other(value)} for key, value in fixed.items()), {"order": "sorted"}]
    ids = {numerics_id(msgspec.structs.replace(SPEC, fixed=one)) for one in variants}
    assert len(ids) == len(variants)
    backwards = dict(reversed(fixed.items()))
    assert numerics_id(msgspec.structs.replace(SPEC, fixed=backwards)) in ids


@pytest.mark.parametrize("name", sorted(FREE))
def test_the_id_does_not_change_with_where_the_model_lies_or_what_the_nodes_agree_on_later(name: str) -> None:
    assert numerics_id(msgspec.structs.replace(SPEC, **{name: FREE[name]})) == numerics_id(SPEC)


@pytest.mark.parametrize("name", ["SEMANTICS_VERSION", "BLOCK_ELEMENTS", "WORKER_ENVIRONMENT"])
def test_the_id_changes_with_the_rules_of_this_version(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = numerics_id(SPEC)
    monkeypatch.setattr(numerics, name, other(getattr(numerics, name)))
    assert numerics_id(SPEC) != before


def test_the_id_is_the_same_in_another_process() -> None:
    code = "from tests.protocol.test_numerics import SPEC, numerics_id; print(numerics_id(SPEC))"
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == numerics_id(SPEC)


def test_a_worker_finds_the_id_that_the_coordinator_sent_even_when_a_person_wrote_whole_numbers(tmp_path: Path) -> None:
    text = "[lora]\nscale = 20\ndropout = 0\n[train]\nmax_grad_norm = 1\nweight_decay = 0\neps = 1"
    spec = run_spec(load_config(run_file(tmp_path, text)))
    welcome, _ = decode(encode(m.Welcome(m.SessionId("run", 1, "1"), spec)))
    assert isinstance(welcome, m.Welcome)
    assert numerics_id(welcome.spec) == welcome.spec.numerics_id == spec.numerics_id


# ---- dropout


def test_a_dropout_key_is_the_first_8_bytes_of_the_hash_of_seed_step_and_leaf() -> None:
    for seed, step, leaf in ((0, 1, 0), (7, 12, 345), (2**63, 1, 1)):
        by_hand = int(hashlib.sha256(f"{seed}:{step}:{leaf}".encode("ascii")).hexdigest()[:16], 16)
        assert dropout_key(seed, step, leaf) == by_hand
    # printf '0:1:2' | sha256sum
    assert dropout_key(0, 1, 2) == 0x75589DEEF412C9BE


def test_no_two_leaves_share_a_dropout_key() -> None:
    places = [(seed, step, leaf) for seed in (0, 1, 11) for step in range(1, 13) for leaf in range(12)]
    assert len({dropout_key(*place) for place in places}) == len(places)
    assert all(0 <= dropout_key(*place) < 2**64 for place in places)


# ---- the canary

# Another numpy must draw the same canary, or nodes that agree would seem to differ.
GOLDEN_IDS = "a01982baae4ce120"
GOLDEN_ADAPTER = "1b60abd5c3c3e238"


@pytest.mark.parametrize("max_length", [2, 3, 5, 48, 1024])
@pytest.mark.parametrize("vocabulary", [2, 96, 151_936])
def test_the_canary_is_a_leaf_that_every_model_can_compute(vocabulary: int, max_length: int) -> None:
    leaf = canary_leaf(vocabulary, max_length)
    width = len(leaf.rows[0].ids)
    assert width <= max_length
    assert len(leaf.rows) == 2
    for row in leaf.rows:
        assert 2 <= len(row.ids) <= width
        assert set(row.ids.tolist()) <= set(range(vocabulary))
        assert row.targets.tolist() == [0] + [1] * (len(row.ids) - 1)
    if max_length > 4:
        assert len(leaf.rows[1].ids) < width


def test_the_canary_is_the_same_on_every_machine() -> None:
    leaf = canary_leaf(96, 1024)
    bits = b"".join(row.ids.tobytes() for row in leaf.rows)
    manifest = manifests.make({"model.layers.0.q.lora_a": (8, 2), "model.layers.0.q.lora_b": (2, 8)})
    adapter = canary_adapter(manifest)
    assert hashlib.sha256(bits).hexdigest()[:16] == GOLDEN_IDS
    assert hashlib.sha256(adapter.tobytes()).hexdigest()[:16] == GOLDEN_ADAPTER
    assert adapter.dtype == np.float32
    assert (adapter != 0).all()
    assert np.abs(adapter).max() <= 0.01


# ---- the promise

SAME, OTHER = ("aa",) * 3, ("bb",) * 3


def test_one_class_of_nodes_promises_the_same_bits() -> None:
    why = "so the adapter does not depend on which node computes which rows"
    what = "computed a test batch with the same bits each time"
    assert promise({"mini-1": SAME}) == Promise("same bits", f"mini-1 {what}, {why}", 1, SAME[0])
    assert promise({"mini-2": SAME, "mini-1": SAME}, 7) == Promise(
        "same bits", f"mini-2, mini-1 {what}, {why}", 7, SAME[0]
    )
    assert promise({"mini-1": SAME}).sentence == f"same bits: mini-1 {what}, {why}"


def test_two_classes_of_nodes_promise_a_tolerance_and_say_who_is_in_which() -> None:
    found = promise({"mini-1": SAME, "studio": OTHER, "mini-2": SAME})
    what = "the nodes computed a test batch with different last bits (mini-1, mini-2 | studio)"
    assert found == Promise("tolerance", f"{what}, so the adapter's depend on which of them computes which rows")


@pytest.mark.parametrize("unsteady", [("aa", "aa", "bb"), ("aa", "bb", "aa"), ("bb", "aa", "aa"), ("a", "b", "c")])
def test_a_node_that_disagrees_with_itself_promises_a_tolerance_and_is_named(unsteady: tuple[str, ...]) -> None:
    found = promise({"mini-1": SAME, "studio": unsteady})
    what = "computed a test batch three times, and not always with the same last bits"
    assert found == Promise("tolerance", f"studio {what}")
    both = promise({"a": unsteady, "mini-1": SAME, "b": unsteady, "c": OTHER})
    assert both == Promise("tolerance", f"a, b {what}")


def test_a_promise_of_later_steps_says_from_which_on() -> None:
    assert Promise("tolerance", "b was used", 1200).sentence == "tolerance, from step 1,200 on: b was used"


def test_a_node_without_an_answer_is_no_proof() -> None:
    assert promise({"mini-1": SAME, "silent": ()}).kind == "tolerance"
