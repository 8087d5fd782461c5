"""Evaluation in one process: the numbers of a validation and of a plain model, the same bits whatever the nodes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlxdist.coordinator.evaluate.judge import Candidate, Judged, judge
from mlxdist.coordinator.evaluate.row_file import records
from mlxdist.coordinator.training.startup import method_of
from tests.coordinator.training.watched import Watched
from tests.laws.memory_fleet import memory_cluster
from tests.laws.plain_loops import Recipe, Trainer, log_probs
from tests.laws.preference_cases import BATCH, case_of
from tests.laws.preference_runs import Case, evaluate_here

LOSSES = ["sigmoid", "ipo", "kto"]


@pytest.fixture(scope="module")
def engines() -> list[Watched]:
    return [Watched() for _ in range(3)]


def judged_here(case: Case, model: Path, engines: Sequence[Watched]) -> list[Judged]:
    """The base model and the case's first adapter, judged on its validation rows."""
    config = case.config(model)
    method = method_of(config, case.stored(case.valid), case.stored(case.valid))
    with memory_cluster(config, engines) as (fleet, _):
        adapter = case.first_adapter(fleet.wait_for_model().manifest)
        base = np.zeros_like(adapter)
        fleet.send_adapter(0, base)
        fleet.wait_for_nodes(len(engines), len(engines), 0.0)
        candidates = [Candidate("base", base), Candidate("step 1", adapter, 1), Candidate("again", adapter, 2)]
        return judge(fleet, method, len(case.valid), candidates, lambda name: None)


def with_valid(loss: str) -> Case:
    case = case_of(loss, replace(BATCH, leaf_tokens=60))
    return replace(case, valid=case.rows)


@pytest.mark.parametrize("loss", LOSSES)
def test_an_adapter_has_the_metrics_that_a_validation_of_the_run_reports(
    loss: str, model: Path, engines: list[Watched]
) -> None:
    case = with_valid(loss)
    base, adapter, again = judged_here(case, model, engines[:2])
    assert evaluate_here(case, model, engines[:1]) == [adapter.metrics]
    assert again.metrics == adapter.metrics  # with the reference log-probs that were kept
    assert base.metrics != adapter.metrics


@pytest.mark.parametrize("loss", LOSSES)
def test_the_bits_do_not_depend_on_the_number_of_nodes(loss: str, model: Path, engines: list[Watched]) -> None:
    case = with_valid(loss)
    one, three = judged_here(case, model, engines[:1]), judged_here(case, model, engines)
    for left, right in zip(one, three, strict=True):
        assert left.metrics == right.metrics
        assert left.loss == right.loss
        assert left.against_base == right.against_base
        for name, column in left.scored.columns.items():
            assert column.tobytes() == right.scored.columns[name].tobytes()


def test_the_base_model_is_the_model_without_an_adapter(model: Path, engines: list[Watched]) -> None:
    case = with_valid("sigmoid")
    base, adapter, _ = judged_here(case, model, engines[:1])
    trainer = Trainer(load_model(model)[0], Recipe())
    for branch, name in enumerate(("policy_chosen", "policy_rejected")):
        rows = [pair[branch] for pair in case.valid]  # type: ignore[index]  # pairs
        plain = np.array(log_probs(trainer, rows))
        in_file_order = np.argsort(base.scored.order)
        np.testing.assert_allclose(base.scored.columns[name][in_file_order], plain, rtol=1e-5)
        assert np.abs(adapter.scored.columns[name][in_file_order] - plain).max() > 1e-3
    assert base.loss.value == pytest.approx(np.log(2), abs=1e-7)
    assert base.loss.standard_error == pytest.approx(0.0, abs=1e-9)
    assert adapter.against_base is not None
    assert adapter.against_base.value == pytest.approx(adapter.loss.value - base.loss.value, abs=1e-7)


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_the_rows_of_the_file_average_to_the_metrics(loss: str, model: Path, engines: list[Watched]) -> None:
    case = with_valid(loss)
    adapter = judged_here(case, model, engines[:1])[1]
    spec = method_of(case.config(model), case.stored(case.valid), None).spec
    rows = list(records(adapter.scored, case.stored(case.valid), spec))
    assert [row["where"] for row in rows] == [f"rows.jsonl:{line}" for line in range(1, len(case.valid) + 1)]
    assert np.mean([row["loss"] for row in rows]) == pytest.approx(adapter.metrics["loss"], rel=1e-12)
    if loss == "sigmoid":
        assert np.mean([row["margin"] for row in rows]) == pytest.approx(adapter.metrics["rewards/margins"], rel=1e-9)
        for row, (chosen, rejected) in zip(rows, case.valid, strict=True):  # type: ignore[misc]  # pairs
            assert (row["tokens_chosen"], row["tokens_rejected"]) == (sum(chosen.targets), sum(rejected.targets))
    else:
        rewards = [row["reward"] for row in rows if row["label"]]
        assert np.mean(rewards) == pytest.approx(adapter.metrics["rewards/chosen"], rel=1e-9)
