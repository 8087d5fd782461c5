"""DPO and KTO over the global batch, in one process: the numbers of one machine, whatever the nodes and leaves."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlxdist.coordinator.batch.micro_batches import cut
from mlxdist.coordinator.methods.reference_logps import References
from mlxdist.protocol.losses import LABEL_SMOOTHING
from tests.cases import slow_but
from tests.coordinator.training.watched import Watched
from tests.laws.plain_model import KtoRow, random_ids
from tests.laws.preference_cases import BATCH, LOSSES, case_of, labeled, of_very_different_lengths
from tests.laws.preference_runs import assert_equals_one_machine, train_here, with_rows


@pytest.fixture(scope="module")
def engines() -> list[Watched]:
    return [Watched() for _ in range(5)]


# ---- equal to plain MLX over the whole batch


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("nodes", "leaf_tokens"), [(1, 16), (3, 60)])
def test_every_step_equals_the_plain_loop_over_the_whole_batch(
    loss: str, nodes: int, leaf_tokens: int, model: Path, engines: list[Watched]
) -> None:
    case = case_of(loss, replace(BATCH, leaf_tokens=leaf_tokens))
    ran = assert_equals_one_machine(case, model, engines[:nodes])
    assert len({step.grad_norm for step in ran.steps}) == 5  # it trains


@pytest.mark.parametrize("loss", sorted(LABEL_SMOOTHING))
def test_label_smoothing_equals_the_plain_loop(loss: str, model: Path, engines: list[Watched]) -> None:
    smoothed = assert_equals_one_machine(case_of(loss, label_smoothing=0.1), model, engines[:2])
    assert smoothed.sha != train_here(case_of(loss), model, engines[:1]).sha


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_pairs_of_very_different_length_weigh_the_same(loss: str, model: Path, engines: list[Watched]) -> None:
    case = case_of(loss, replace(BATCH, size=5, leaf_tokens=60), rows=of_very_different_lengths())
    assert_equals_one_machine(case, model, engines[:2])


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_a_step_of_two_windows_is_one_batch(loss: str, model: Path, engines: list[Watched]) -> None:
    """KTO's reference point is that of all windows: one of each window would be another number."""
    case = case_of(loss, replace(BATCH, size=2, grad_accum_steps=2, leaf_tokens=60))
    assert [len(step.windows) for step in case.order()] == ([2, 2, 2, 2, 2] if loss == "sigmoid" else [2, 1, 2, 1, 2])
    assert_equals_one_machine(case, model, engines[:3])


# ---- KTO's reference point


@pytest.mark.parametrize("labels", [(1, 1, 1, 1, 1), (0, 0, 0, 0, 0)], ids=["desirable", "undesirable"])
def test_one_class_alone_is_an_ordinary_batch(labels: tuple[int, ...], model: Path, engines: list[Watched]) -> None:
    case = case_of("kto", replace(BATCH, size=5), rows=labeled(labels))
    ran = assert_equals_one_machine(case, model, engines[:2])
    present, absent = ("chosen", "rejected") if labels[0] else ("rejected", "chosen")
    for step in ran.steps:
        assert (step.metrics[f"count/{present}"], step.metrics[f"count/{absent}"]) == (5, 0)
        assert f"rewards/{present}" in step.metrics
        assert f"rewards/{absent}" not in step.metrics


def test_a_batch_of_two_rows_has_a_reference_point(model: Path, engines: list[Watched]) -> None:
    case = case_of("kto", replace(BATCH, size=2), rows=labeled((1, 0)))
    ran = assert_equals_one_machine(case, model, engines[:2])
    assert any(step.metrics["kl"] > 0 for step in ran.steps)


def test_the_reference_point_is_sometimes_above_0_and_sometimes_clamped(model: Path, engines: list[Watched]) -> None:
    """Of the data of these laws: a trainer without reference point, or without its clamp, would not pass them."""
    points = [step.metrics["kl"] for step in train_here(case_of("kto"), model, engines[:1]).steps]
    assert min(points) == 0.0
    assert max(points) > 0.1


@pytest.mark.parametrize("bos_id", [None, 7])
def test_a_kl_pair_is_trimmed_again_for_the_completion_that_it_gets(
    bos_id: int | None, model: Path, engines: list[Watched]
) -> None:
    """Rows that fit as they are, and whose prompts do not fit beside another row's completion."""
    rng = np.random.default_rng(5)
    lengths = [(17, 4), (3, 19), (20, 2), (1, 21), (21, 1)]
    rows = [
        KtoRow(random_ids(rng, prompt), random_ids(rng, completion), place % 2 == 0)
        for place, (prompt, completion) in enumerate(lengths)
    ]
    case = case_of("kto", replace(BATCH, size=5, max_length=24), rows=rows, bos_id=bos_id)
    assert max(len(case.stored(rows).rows(place)[0].ids) for place in range(5)) < 24
    engines[0].asked.clear()
    assert_equals_one_machine(case, model, engines[:1])
    scored = [job for job in engines[0].asked if job.assignment.verb == "score"]
    assert max(len(row.ids) for job in scored for leaf in job.leaves for row in leaf.rows) == 24


# ---- the same bits for every number of nodes


@pytest.mark.parametrize("loss", slow_but(("sigmoid", "kto"), LOSSES))
def test_the_adapter_and_every_metric_have_the_same_bits_for_1_2_3_and_5_nodes(
    loss: str, model: Path, engines: list[Watched]
) -> None:
    one = train_here(case_of(loss), model, engines[:1])
    for nodes in (2, 3, 5):
        many = train_here(case_of(loss), model, engines[:nodes])
        assert many.sha == one.sha, f"{nodes} nodes"
        assert [(step.metrics, step.grad_norm) for step in many.steps] == [
            (step.metrics, step.grad_norm) for step in one.steps
        ]
        assert np.array_equal(many.state.references.train, one.state.references.train)


@pytest.mark.parametrize("loss", slow_but(("sigmoid",), ["sigmoid", "kto"]))
def test_leaves_of_three_have_the_same_bits_for_every_number_of_nodes(
    loss: str, model: Path, engines: list[Watched]
) -> None:
    case = case_of(loss, replace(BATCH, size=7, leaf_tokens=90))
    shas = {train_here(case, model, engines[:nodes]).sha for nodes in (1, 2, 3, 5)}
    assert len(shas) == 1


def test_one_node_with_desirable_and_one_with_undesirable_rows_is_the_global_batch(
    model: Path, engines: list[Watched]
) -> None:
    batch = replace(BATCH, size=4)
    drawn = case_of("kto", batch, rows=labeled((1, 1, 0, 0)))
    order = cut(drawn.order()[0], drawn.stored(drawn.rows), BATCH.leaf_tokens).order  # type: ignore[arg-type]
    labels = [int(row in order[:2]) for row in range(4)]  # the first node gets the first half of the leaves
    case = case_of("kto", batch, rows=labeled(labels), total_steps=1)
    for engine in engines:
        engine.asked.clear()
    ran = assert_equals_one_machine(case, model, engines[:2])
    seen = [
        {label for row_inputs in job.row_inputs for label in row_inputs["labels"]}
        for engine in engines[:2]
        for job in engine.asked
        if job.assignment.verb == "gradient"
    ]
    assert seen == [{1.0}, {0.0}]
    assert {"rewards/chosen", "rewards/rejected"} <= ran.steps[0].metrics.keys()
    assert train_here(case, model, engines[:1]).sha == ran.sha


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_nodes_without_work_change_nothing(loss: str, model: Path, engines: list[Watched]) -> None:
    case = case_of(loss, replace(BATCH, size=2, remainder="drop"))
    one = train_here(case, model, engines[:1])
    for engine in engines:
        engine.asked.clear()
    many = train_here(case, model, engines)
    assert many.sha == one.sha
    rounds = {(job.assignment.step, job.assignment.verb) for engine in engines for job in engine.asked}
    for step, verb in rounds:  # two leaves for five nodes
        asked = [
            engine
            for engine in engines
            if any((job.assignment.step, job.assignment.verb) == (step, verb) for job in engine.asked)
        ]
        assert len(asked) <= 2


# ---- the first step


@pytest.mark.parametrize("leaf_tokens", [16, 90])
@pytest.mark.parametrize(("reference", "fresh"), [("base", True), ("initial", True), ("initial", False)])
def test_the_first_step_of_dpo_has_rewards_of_exactly_0_and_loss_ln_2(
    leaf_tokens: int, reference: str, fresh: bool, model: Path, engines: list[Watched]
) -> None:
    """Policy and reference then have the same parameters, and the same bits in the same leaf."""
    batch = replace(BATCH, size=7, leaf_tokens=leaf_tokens)
    case = case_of("sigmoid", batch, reference=reference, fresh=fresh, total_steps=1)
    metrics = train_here(case, model, engines[:2]).steps[0].metrics
    assert metrics["loss"] == float(np.float32(math.log(2)))
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"):
        assert metrics[name] == 0.0


@pytest.mark.parametrize("leaf_tokens", [16, 90])
def test_the_first_step_of_kto_has_rewards_of_exactly_0_and_loss_a_half(
    leaf_tokens: int, model: Path, engines: list[Watched]
) -> None:
    case = case_of("kto", replace(BATCH, leaf_tokens=leaf_tokens), fresh=True, weights=(1.0, 1.0), total_steps=1)
    metrics = train_here(case, model, engines[:2]).steps[0].metrics
    assert metrics["loss"] == 0.5
    for name in ("kl", "rewards/chosen", "rewards/rejected", "rewards/margins"):
        assert metrics[name] == 0.0


# ---- what is said


def test_a_collapse_of_the_rewards_is_said_once(model: Path, engines: list[Watched]) -> None:
    case = case_of("sigmoid")

    def sure(references: References) -> References:
        """As if the base had been sure of both, of the rejected ones more."""
        return with_rows(references, dict.fromkeys(range(len(references.train)), (0.0, 400.0)))

    notes = train_here(case, model, engines[:1], knowing=sure).notes
    assert len(notes) == 1
    assert notes[0].startswith("The rewards collapse: the loss is ")
    assert train_here(case, model, engines[:1]).notes == []
