"""Plain MLX training over the whole global batch, in one process and one graph: what every run must equal.

Nothing of the trainer is used, only mlx and mlx-lm: a full forward with padding, log softmax over the vocabulary,
autograd through the whole model, `mlx.optimizers` on the parameter tree. `Parts` are the places where a trainer goes
wrong, so that `tests.laws.planted_bugs` can put a bug into each.

Shapes: R rows or pairs of a step, T tokens of the longest row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.optimizers import AdamW
from mlx.utils import tree_flatten, tree_map

from tests.laws.plain_losses import PAIR_LOSSES, rate_at, row_losses
from tests.laws.plain_model import Adapter, Ids, KtoRow, PlainRow, adapter_of, joined, set_dropout, use_adapter

LossOf = Callable[[], tuple[mx.array, dict[str, mx.array]]]
Step = TypeVar("Step")


@dataclass(frozen=True)
class Recipe:
    """The numbers of a run; names are those of run.toml."""

    learning_rate: float = 1e-3
    schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 5
    min_lr_ratio: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    loss: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    reference: str = "base"
    max_length: int = 1024
    bos_id: int | None = None


@dataclass(frozen=True)
class PlainStep:
    """The result of one step: metrics under TRL's names (loss included), the norm before clipping, the adapter."""

    metrics: dict[str, float]
    grad_norm: float
    adapter: dict[str, np.ndarray]


def roll(count: int) -> list[int]:
    """The rows that give their completions to the KL pairs: row i - 1 to row i, the last row to row 0."""
    return [(i - 1) % count for i in range(count)]


@dataclass(frozen=True)
class Parts:
    """The pieces of a step that the planted bugs replace."""

    mask: Callable[[np.ndarray, np.ndarray], np.ndarray] = lambda targets, lengths: targets  # [R, T] -> [R, T]
    mean: Callable[[mx.array, mx.array], mx.array] = lambda losses, weights: losses.sum() / weights.sum()
    roll: Callable[[int], list[int]] = roll
    clamp: Callable[[mx.array], mx.array] = lambda z0: mx.maximum(z0, 0)
    reference_dropout: float = 0.0
    bias_correction: bool = True
    updates_done: Callable[[int], int] = lambda step: step - 1


@dataclass(frozen=True)
class Trainer:
    """A model with LoRA layers and how to train it."""

    model: nn.Module
    recipe: Recipe
    parts: Parts = field(default_factory=Parts)


def log_probs(trainer: Trainer, rows: Sequence[PlainRow]) -> mx.array:
    """Each row's sum of log-probabilities over its targets [R] (for ipo the mean), with a graph."""
    longest = max(len(row.ids) for row in rows)
    ids = np.zeros((len(rows), longest), dtype=np.int32)
    targets = np.zeros((len(rows), longest), dtype=np.float32)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = row.ids
        targets[i, : len(row.ids)] = row.targets
    mask = trainer.parts.mask(targets, np.array([len(row.ids) for row in rows]))[:, 1:]
    logits = trainer.model(mx.array(ids[:, :-1])).astype(mx.float32)
    every = logits - mx.logsumexp(logits, axis=-1, keepdims=True)  # [R, T - 1, vocabulary]
    chosen = mx.take_along_axis(every, mx.array(ids[:, 1:, None]), axis=-1)[..., 0]
    sums = (chosen * mx.array(mask)).sum(axis=-1)
    return sums / mx.array(mask.sum(axis=-1)) if trainer.recipe.loss == "ipo" else sums


def reference_log_probs(trainer: Trainer, rows: Sequence[PlainRow], reference: Adapter) -> mx.array:
    """The same under the reference's adapter, without dropout and without a graph."""
    current = adapter_of(trainer.model)
    use_adapter(trainer.model, reference)
    set_dropout(trainer.model, trainer.parts.reference_dropout)
    trainer.model.train(trainer.parts.reference_dropout > 0)
    sums = mx.stop_gradient(log_probs(trainer, rows))
    mx.eval(sums)
    set_dropout(trainer.model, 0.0)
    trainer.model.train()
    use_adapter(trainer.model, current)
    return sums


def fitted(recipe: Recipe, prompt: Ids, completion: Ids) -> PlainRow:
    """A row of both; the prompt loses its first tokens where they do not fit, and a BOS stands before what is left."""
    bos = () if recipe.bos_id is None else (recipe.bos_id,)
    excess = max(len(bos) + len(prompt) + len(completion) - recipe.max_length, 0)
    return joined(bos + prompt[excess:], completion)


def kl_pairs(recipe: Recipe, rows: Sequence[KtoRow], givers: Sequence[int]) -> list[PlainRow]:
    """Each row's prompt with the completion of its giver."""
    return [fitted(recipe, row.prompt, rows[giver].completion) for row, giver in zip(rows, givers, strict=True)]


def plain_sft(trainer: Trainer, steps: Sequence[Sequence[PlainRow]]) -> list[PlainStep]:
    """Cross-entropy per supervised token of the step."""

    def loss_of(rows: Sequence[PlainRow]) -> tuple[mx.array, dict[str, mx.array]]:
        weights = mx.array([float(sum(row.targets)) for row in rows])
        return trainer.parts.mean(-log_probs(trainer, rows), weights), {}

    return _train(trainer, steps, lambda rows: lambda: loss_of(rows))


def plain_dpo(trainer: Trainer, steps: Sequence[Sequence[tuple[PlainRow, PlainRow]]]) -> list[PlainStep]:
    """A pair loss of `PAIR_LOSSES`, per pair of the step."""
    recipe, reference = trainer.recipe, _reference(trainer)

    def prepare(pairs: Sequence[tuple[PlainRow, PlainRow]]) -> LossOf:
        chosen, rejected = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        ref_chosen = reference_log_probs(trainer, chosen, reference)
        ref_rejected = reference_log_probs(trainer, rejected, reference)

        def loss_of() -> tuple[mx.array, dict[str, mx.array]]:
            logp_chosen, logp_rejected = log_probs(trainer, chosen), log_probs(trainer, rejected)
            c, r = logp_chosen - ref_chosen, logp_rejected - ref_rejected
            losses = PAIR_LOSSES[recipe.loss](c, r, recipe.beta, recipe.label_smoothing)
            return trainer.parts.mean(losses, mx.ones_like(losses)), {
                "rewards/chosen": recipe.beta * c.mean(),
                "rewards/rejected": recipe.beta * r.mean(),
                "rewards/margins": recipe.beta * (c - r).mean(),
                "rewards/accuracies": (c > r).astype(mx.float32).mean(),
                "logps/chosen": logp_chosen.mean(),
                "logps/rejected": logp_rejected.mean(),
            }

        return loss_of

    return _train(trainer, steps, prepare)


def plain_kto(trainer: Trainer, steps: Sequence[Sequence[KtoRow]]) -> list[PlainStep]:
    """KTO per row of the step."""
    recipe, reference = trainer.recipe, _reference(trainer)

    def prepare(parted: Sequence[KtoRow]) -> LossOf:
        rows = [fitted(recipe, row.prompt, row.completion) for row in parted]
        labels = mx.array([float(row.desirable) for row in parted])
        weights = labels * recipe.desirable_weight + (1 - labels) * recipe.undesirable_weight
        pairs = kl_pairs(recipe, parted, trainer.parts.roll(len(parted)))
        ref, ref_kl = (reference_log_probs(trainer, some, reference) for some in (rows, pairs))
        z0 = mx.array(0.0)
        if recipe.loss == "kto":
            z0 = trainer.parts.clamp((mx.stop_gradient(log_probs(trainer, pairs)) - ref_kl).mean())

        def loss_of() -> tuple[mx.array, dict[str, mx.array]]:
            policy = log_probs(trainer, rows)
            losses = weights * row_losses(recipe.loss, policy - ref, labels, z0, recipe.beta)
            metrics = {"kl": z0}
            for name, members in (("chosen", labels), ("rejected", 1 - labels)):
                count = members.sum()
                metrics[f"count/{name}"] = count
                if count.item():
                    metrics[f"rewards/{name}"] = recipe.beta * ((policy - ref) * members).sum() / count
                    metrics[f"logps/{name}"] = (policy * members).sum() / count
            if "rewards/chosen" in metrics and "rewards/rejected" in metrics:
                metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
            return trainer.parts.mean(losses, mx.ones_like(losses)), metrics

        return loss_of

    return _train(trainer, steps, prepare)


def _train(trainer: Trainer, steps: Sequence[Step], prepare: Callable[[Step], LossOf]) -> list[PlainStep]:
    """`prepare` computes the constants of a step, its result the mean loss with a graph and the other metrics."""
    recipe, model = trainer.recipe, trainer.model
    optimizer = AdamW(
        recipe.learning_rate,
        list(recipe.betas),
        recipe.eps,
        recipe.weight_decay,
        bias_correction=trainer.parts.bias_correction,
    )
    model.train()
    done = []
    for number, rows in enumerate(steps, start=1):
        loss_of = prepare(rows)
        (loss, metrics), gradients = nn.value_and_grad(model, loss_of)()
        norm = mx.sqrt(sum(mx.square(g).sum() for _, g in tree_flatten(gradients))).item()
        if recipe.max_grad_norm > 0:
            scale = min(1.0, recipe.max_grad_norm / (norm + 1e-6))
            gradients = tree_map(lambda g, scale=scale: g * scale, gradients)
        optimizer.learning_rate = rate_at(
            trainer.parts.updates_done(number),
            recipe.learning_rate,
            recipe.schedule,
            recipe.warmup_steps,
            recipe.total_steps,
            recipe.min_lr_ratio,
        )
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        numbers = {name: value.item() for name, value in {"loss": loss, **metrics}.items()}
        done.append(PlainStep(numbers, norm, {name: np.array(a) for name, a in adapter_of(model).items()}))
    return done


def _reference(trainer: Trainer) -> Adapter:
    """The adapter of the reference: switched off, or as it is now."""
    now = adapter_of(trainer.model)
    if trainer.recipe.reference == "initial":
        return now
    return {name: mx.zeros_like(value) for name, value in now.items()}
