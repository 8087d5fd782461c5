"""The plain loops are right where they can be checked by hand, and a comparison with them sees every planted bug."""

import math
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlxdist.coordinator.training.schedule import SCHEDULES, learning_rate
from mlxdist.protocol.losses import DPO_LOSSES, KTO_LOSSES
from mlxdist.protocol.objectives import dpo_losses, kto_losses
from tests.laws.plain_loops import (
    Parts,
    PlainStep,
    Recipe,
    Trainer,
    kl_pairs,
    log_probs,
    plain_dpo,
    plain_kto,
    plain_sft,
)
from tests.laws.plain_losses import PAIR_LOSSES, rate_at, row_losses
from tests.laws.plain_model import KtoRow, PlainRow, dpo_steps, kto_steps, sft_steps, tiny_llama, with_lora
from tests.laws.planted_bugs import BUGS, assert_same_training

RECIPE = Recipe(schedule="cosine", min_lr_ratio=0.0, max_grad_norm=1.0, reference="initial", max_length=24)


def run(method: str, parts: Parts, recipe: Recipe = RECIPE, fresh: bool = False) -> list[PlainStep]:
    trainer = Trainer(with_lora(tiny_llama(), fresh=fresh), recipe, parts)
    if method == "sft":
        return plain_sft(trainer, sft_steps())
    if method == "dpo":
        return plain_dpo(trainer, dpo_steps())
    return plain_kto(Trainer(trainer.model, replace(recipe, loss="kto"), parts), kto_steps())


@pytest.fixture(scope="module")
def right() -> dict[str, list[PlainStep]]:
    return {method: run(method, Parts()) for method in ("sft", "dpo", "kto")}


@pytest.mark.parametrize("method", ["sft", "dpo", "kto"])
def test_a_plain_loop_agrees_with_itself(right: dict[str, list[PlainStep]], method: str) -> None:
    assert_same_training(run(method, Parts()), right[method], relative=0.0)


@pytest.mark.parametrize(("name", "method"), [(name, method) for name, bug in BUGS.items() for method in bug.methods])
def test_the_comparison_sees_the_planted_bug(right: dict[str, list[PlainStep]], name: str, method: str) -> None:
    with pytest.raises(AssertionError):
        assert_same_training(run(method, BUGS[name].parts), right[method])


def test_the_log_probability_of_a_row_is_its_tokens_one_after_the_other() -> None:
    trainer = Trainer(with_lora(tiny_llama()), RECIPE)
    row = PlainRow((5, 6, 7, 8), (0, 0, 1, 1))
    expected = 0.0
    for place in (2, 3):
        logits = trainer.model(mx.array([row.ids[:place]]))[0, -1]
        expected += (logits[row.ids[place]] - mx.logsumexp(logits)).item()
    longer = PlainRow(tuple(range(20)), (0,) * 4 + (1,) * 16)
    assert log_probs(trainer, [row, longer])[0].item() == pytest.approx(expected, rel=1e-5)


def test_the_first_step_of_dpo_from_a_fresh_adapter_has_rewards_of_0_and_loss_ln_2() -> None:
    first = run("dpo", Parts(), replace(RECIPE, reference="base"), fresh=True)[0].metrics
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert first["rewards/chosen"] == first["rewards/rejected"] == first["rewards/accuracies"] == 0.0


def test_training_lowers_the_loss() -> None:
    trainer = Trainer(with_lora(tiny_llama()), replace(RECIPE, total_steps=30, schedule="constant"))
    losses = [step.metrics["loss"] for step in plain_dpo(trainer, dpo_steps(steps=1) * 30)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_kl_pair_takes_the_completion_before_and_trims_its_prompt_again() -> None:
    rows = [KtoRow((1, 2), (3,), True), KtoRow((4, 5, 6), (7, 8, 9), False)]
    pairs = kl_pairs(Recipe(max_length=4), rows, [1, 0])
    assert [pair.ids for pair in pairs] == [(2, 7, 8, 9), (4, 5, 6, 3)]  # row 1's own would have begun with 6
    assert [pair.targets for pair in pairs] == [(0, 1, 1, 1), (0, 0, 0, 1)]
    with_bos = kl_pairs(Recipe(max_length=4, bos_id=60), rows, [1, 0])
    assert [pair.ids for pair in with_bos] == [(60, 7, 8, 9), (60, 5, 6, 3)]


@pytest.mark.parametrize("loss", DPO_LOSSES)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_losses_written_twice_agree(loss: str, label_smoothing: float) -> None:
    rng = np.random.default_rng(1)
    rows = [mx.array(rng.normal(-30, 3, 8).astype(np.float32)) for _ in range(4)]
    plain = PAIR_LOSSES[loss](rows[0] - rows[2], rows[1] - rows[3], 0.1, label_smoothing)
    ours = dpo_losses(*rows, loss=loss, beta=0.1, label_smoothing=label_smoothing)
    np.testing.assert_allclose(np.array(ours), np.array(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", KTO_LOSSES)
def test_the_kto_losses_written_twice_agree(loss: str) -> None:
    rng = np.random.default_rng(2)
    policy, ref = (mx.array(rng.normal(-30, 3, 8).astype(np.float32)) for _ in range(2))
    labels = mx.array([1.0, 0, 1, 0, 0, 0, 1, 1])
    plain = row_losses(loss, policy - ref, labels, mx.array(0.7), 0.1)
    np.testing.assert_allclose(
        np.array(kto_losses(policy, ref, labels, 0.7, loss=loss, beta=0.1)), np.array(plain), rtol=1e-5
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_schedules_written_twice_agree(schedule: str) -> None:
    for step in range(1, 41):
        ours = learning_rate(step, base=2e-4, schedule=schedule, warmup_steps=7, total_steps=40, min_lr_ratio=0.1)
        assert ours == pytest.approx(rate_at(step - 1, 2e-4, schedule, 7, 40, 0.1), rel=1e-12)
