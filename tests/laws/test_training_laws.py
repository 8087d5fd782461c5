"""The laws of the whole thing, in one process: the adapter is a function of the data, not of the nodes."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlxdist.coordinator.config.schema import BatchConfig, DataConfig, LoraConfig, RunConfig, TrainConfig
from mlxdist.coordinator.training.initial_adapter import draw
from mlxdist.coordinator.training.state import State
from mlxdist.node.work.engine import Engine
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol.leaves import Row
from tests.coordinator.training.silent import Silent
from tests.laws import plain_model
from tests.laws.memory_fleet import ListRows, make_row, memory_fleet, train_sft
from tests.laws.model_folder import VOCABULARY
from tests.laws.plain_loops import Recipe, plain_sft
from tests.laws.plain_loops import Trainer as PlainTrainer

Trainer = Callable[..., tuple[State, Silent]]


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    return [Engine() for _ in range(9)]


def rows_of_many_lengths(count: int, seed: int = 0) -> list[Row]:
    """Rows of 3 to 60 tokens, the first all prompt but one token."""
    random = np.random.default_rng(seed)
    rows = [make_row(0, random.integers(0, VOCABULARY, 40).tolist(), 39)]
    for row_id in range(1, count):
        length = int(random.integers(3, 60))
        rows.append(
            make_row(row_id, random.integers(0, VOCABULARY, length).tolist(), int(random.integers(0, length - 1)))
        )
    return rows


@pytest.fixture
def trained(model: Path, engines: list[Engine], tmp_path: Path) -> Trainer:
    def run(
        nodes: int, rows: Sequence[Row], batch: BatchConfig, steps: int = 3, lora: LoraConfig | None = None
    ) -> tuple[State, Silent]:
        config = RunConfig(
            model=str(model),
            output=tmp_path,
            data=DataConfig(path="none"),
            batch=batch,
            lora=lora or LoraConfig(rank=4),
            train=TrainConfig(steps=steps, learning_rate=1e-2, eval_every=0),
        )
        silent = Silent()
        with memory_fleet(config, engines[:nodes]) as fleet:
            state = train_sft(config, fleet, nodes, ListRows(rows), silent)
            assert fleet._pool.most_held <= nodes + 2 + (len(rows) - 1).bit_length()
        return state, silent

    return run


def sha(state: State) -> str:
    return hashlib.sha256(state.adapter.tobytes()).hexdigest()


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(BatchConfig(size=8, leaf_tokens=16), marks=pytest.mark.slow),
        BatchConfig(size=8, leaf_tokens=90),
        pytest.param(BatchConfig(size=4, leaf_tokens=16, grad_accum_steps=2), marks=pytest.mark.slow),
        BatchConfig(size=3, leaf_tokens=60, grad_accum_steps=2, remainder="keep"),
    ],
    ids=["a row a leaf", "a few rows", "accumulated, short last step", "kept remainder"],
)
def test_the_adapter_has_the_same_bits_for_every_number_of_nodes(trained: Trainer, batch: BatchConfig) -> None:
    rows = rows_of_many_lengths(20)
    one, told = trained(1, rows, batch)
    for nodes in (2, 3, 5, 9):
        many, same = trained(nodes, rows, batch)
        assert sha(many) == sha(one), f"{nodes} nodes"
        assert (same.losses, same.norms) == (told.losses, told.norms)
    assert not np.array_equal(one.adapter, trained(1, rows, batch, steps=2)[0].adapter)


@pytest.mark.parametrize(
    "batch",
    [
        BatchConfig(size=12, leaf_tokens=16),
        BatchConfig(size=12, leaf_tokens=150),
        BatchConfig(size=6, grad_accum_steps=2),
    ],
    ids=["a row a leaf", "a few rows", "two windows"],
)
@pytest.mark.parametrize("nodes", [1, 3])
def test_every_step_equals_plain_mlx_over_the_whole_batch(
    trained: Trainer, model: Path, batch: BatchConfig, nodes: int
) -> None:
    """Each epoch is one step here, so that the plain loop needs no order: every step has all rows."""
    rows = rows_of_many_lengths(12)
    state, told = trained(nodes, rows, batch, steps=2)
    plain = plain_model.with_lora(load_model(model)[0], rank=4, scale=1.0)
    manifest = manifests.make({name: a.shape for name, a in plain_model.adapter_of(plain).items()})
    first = manifests.split(manifest, draw(manifest, seed=0))
    plain_model.use_adapter(plain, {name: mx.array(part) for name, part in first.items()})
    same_rows = [plain_model.PlainRow(tuple(row.ids.tolist()), tuple(row.targets.tolist())) for row in rows]
    expected = plain_sft(PlainTrainer(plain, Recipe(learning_rate=1e-2)), [same_rows, same_rows])
    np.testing.assert_allclose(told.losses, [step.metrics["loss"] for step in expected], rtol=1e-5)
    np.testing.assert_allclose(told.norms, [step.grad_norm for step in expected], rtol=1e-5)
    # As one vector: AdamW divides by a gradient's own size, so an element whose gradients cancel has few digits.
    other = manifests.join(manifest, expected[-1].adapter)
    assert np.linalg.norm(state.adapter - other) <= 1e-5 * np.linalg.norm(other)
    assert np.linalg.norm(state.adapter - draw(manifest, seed=0)) > 1e-2 * np.linalg.norm(other)


def test_the_loss_counts_exactly_the_supervised_targets(trained: Trainer) -> None:
    rows = rows_of_many_lengths(12)
    for nodes in (1, 4):
        _, told = trained(nodes, rows, BatchConfig(size=12), steps=1)
        assert told.reports[0].tokens == sum(int(row.targets.sum()) for row in rows)


def test_dropout_draws_the_same_masks_on_every_node(trained: Trainer) -> None:
    rows, batch = rows_of_many_lengths(16), BatchConfig(size=8, leaf_tokens=60)
    dropped = LoraConfig(rank=4, dropout=0.5)
    one, _ = trained(1, rows, batch, lora=dropped)
    three, _ = trained(3, rows, batch, lora=dropped)
    assert sha(one) == sha(three)
    assert sha(one) != sha(trained(1, rows, batch, lora=LoraConfig(rank=4))[0])
