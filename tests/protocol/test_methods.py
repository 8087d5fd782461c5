"""The table of methods: complete, and read by name on both sides."""

from typing import get_args

import numpy as np
import pytest

from mlxdist.protocol.methods import DPO, KTO, METHODS, SFT, MethodName, columns_of, named


def test_the_names_for_type_checkers_are_those_of_the_table() -> None:
    assert get_args(MethodName) == tuple(METHODS)
    assert all(name == spec.name for name, spec in METHODS.items())


def test_a_method_with_a_reference_knows_it_for_every_branch() -> None:
    for spec in METHODS.values():
        assert len(spec.reference) in (0, spec.branches)


def test_the_columns_of_outputs_and_scores_have_names() -> None:
    assert SFT.row_outputs == ("loss", "policy")
    assert DPO.row_outputs == ("loss", "policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")
    assert KTO.scores("current+reference") == ("policy", "ref")
    assert DPO.scores("current") == ("policy_chosen", "policy_rejected")


def test_columns_are_read_by_name_and_another_number_of_them_is_an_error() -> None:
    outputs = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert columns_of(KTO.row_outputs, outputs)["ref"].tolist() == [2.0, 5.0]
    with pytest.raises(ValueError, match="shorter"):
        columns_of(KTO.row_outputs, outputs[:, :2])


def test_methods_are_named_in_the_order_of_the_table() -> None:
    assert named(lambda spec: spec.labels) == '"kto"'
    assert named(lambda spec: spec in (KTO, DPO)) == '"dpo" and "kto"'
    assert named(lambda spec: spec in (SFT, DPO, KTO)) == '"sft", "dpo" and "kto"'
