"""ORPO over the global batch: loss and gradient of plain MLX over the whole batch, whatever the nodes and leaves."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlxdist.protocol import manifest as manifests
from mlxdist.protocol.objectives import orpo_losses
from tests.coordinator.training.watched import Watched
from tests.laws import plain_model
from tests.laws.plain_loops import Recipe, Trainer, log_probs
from tests.laws.plain_model import PlainRow
from tests.laws.preference_cases import BATCH, of_very_different_lengths, pairs
from tests.laws.preference_runs import RANK, SCALE, Case, evaluate_here, train_here


@pytest.fixture(scope="module")
def engines() -> list[Watched]:
    return [Watched() for _ in range(3)]


def orpo(**values: object) -> Case:
    given = {"rows": of_very_different_lengths(), "loss": "orpo", "method": "orpo", "batch": BATCH, **values}
    return Case(**given)  # type: ignore[arg-type]


def whole(row: PlainRow) -> PlainRow:
    """The row with every token but the first as a target."""
    return PlainRow(row.ids, (0, *(1,) * (len(row.ids) - 1)))


def plain_loss(trainer: Trainer, rows: list[tuple[PlainRow, PlainRow]], beta: float) -> mx.array:
    """Equation 6 of the paper in its own terms: cross-entropy for each token, minus the mean log of the odds' ratio."""
    texts = [whole(chosen) for chosen, _ in rows]
    nll = -log_probs(trainer, texts).sum() / sum(sum(row.targets) for row in texts)
    odds = []
    for branch in (0, 1):
        side = [pair[branch] for pair in rows]
        mean = log_probs(trainer, side) / mx.array([float(sum(row.targets)) for row in side])
        odds.append(mx.exp(mean) / (1 - mx.exp(mean)))
    return nll - beta * mx.log(1 / (1 + odds[1] / odds[0])).mean()


@pytest.mark.parametrize(("nodes", "leaf_tokens"), [(1, 16), (3, 60)])
def test_the_first_step_is_that_of_plain_mlx_over_the_whole_batch(
    nodes: int, leaf_tokens: int, model: Path, engines: list[Watched]
) -> None:
    case = orpo(batch=replace(BATCH, size=5, leaf_tokens=leaf_tokens), total_steps=2)
    ran = train_here(case, model, engines[:nodes])
    rows = [case.rows[row] for row in case.order()[0].rows]
    plain = plain_model.with_lora(load_model(model)[0], rank=RANK, scale=SCALE)
    manifest = manifests.make({name: a.shape for name, a in plain_model.adapter_of(plain).items()})
    first = manifests.split(manifest, case.first_adapter(manifest))
    plain_model.use_adapter(plain, {name: mx.array(part) for name, part in first.items()})
    trainer = Trainer(plain, Recipe())
    loss, gradient = nn.value_and_grad(plain, lambda: plain_loss(trainer, rows, case.beta))()  # type: ignore[arg-type]
    norm = float(np.sqrt(sum(float(mx.square(part).sum()) for _, part in tree_flatten(gradient))))
    assert ran.steps[0].metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert ran.steps[0].grad_norm == pytest.approx(norm, rel=1e-4)
    assert ran.steps[1].metrics["loss"] != ran.steps[0].metrics["loss"]


def test_the_adapter_has_the_same_bits_for_any_number_of_nodes(model: Path, engines: list[Watched]) -> None:
    case = orpo(batch=replace(BATCH, leaf_tokens=16))
    assert len({train_here(case, model, engines[:nodes]).sha for nodes in (1, 2, 3)}) == 1


def test_a_validation_has_the_loss_of_a_step_over_the_same_rows(model: Path, engines: list[Watched]) -> None:
    rows = pairs(4)
    case = orpo(rows=rows, valid=rows, batch=replace(BATCH, size=4, leaf_tokens=16), total_steps=1)
    step = train_here(case, model, engines[:2]).steps[0].metrics
    (validation,) = evaluate_here(case, model, engines[:1])
    assert validation.keys() == step.keys()
    for name, value in step.items():
        assert validation[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("chosen", [-1e-9, -1e-4, -0.3, -0.7, -30.0, -300.0])
def test_the_loss_is_finite_and_exact_at_its_extremes(chosen: float) -> None:
    def loss(value: mx.array) -> mx.array:
        return orpo_losses(value, mx.array([-0.5]), mx.array([-9.0]), beta=0.1, text_weight=0.25).sum()

    found, slope = mx.value_and_grad(loss)(mx.array([chosen]))
    logp = min(chosen, -1e-6)
    odds = (chosen + 0.5) - (np.log(-np.expm1(logp)) - np.log(-np.expm1(-0.5)))
    assert found.item() == pytest.approx(2.25 + 0.1 * np.logaddexp(0.0, -odds), rel=1e-5)
    assert np.isfinite(slope.item())
