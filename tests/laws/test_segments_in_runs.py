"""The laws of training hold in segments too: the same bits for every number of nodes, the same adapter as whole."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mlxdist.coordinator.config.schema import BatchConfig, DataConfig, LoraConfig, MemoryConfig, RunConfig, TrainConfig
from mlxdist.node.work.engine import Engine
from mlxdist.protocol.vectors import Vector
from tests.laws.memory_fleet import adapter_of, make_row, sha
from tests.laws.model_folder import VOCABULARY

Trained = Callable[..., Vector]


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    return [Engine() for _ in range(3)]


@pytest.fixture
def trained(model: Path, engines: list[Engine], tmp_path: Path) -> Trained:
    def run(nodes: int, memory: MemoryConfig, dropout: float = 0.0) -> Vector:
        random = np.random.default_rng(1)
        rows = [make_row(i, random.integers(0, VOCABULARY, 5 + 3 * i).tolist(), i % 4) for i in range(12)]
        config = RunConfig(
            model=str(model),
            output=tmp_path,
            data=DataConfig(path="none"),
            batch=BatchConfig(size=6, leaf_tokens=60),
            lora=LoraConfig(rank=4, dropout=dropout),
            train=TrainConfig(steps=3, learning_rate=1e-2, eval_every=0),
            memory=memory,
        )
        return adapter_of(config, engines[:nodes], rows)

    return run


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(
    "memory",
    [MemoryConfig(segment_size=1, head_chunk=8), MemoryConfig(segment_size="off", grad_checkpoint=True)],
    ids=["segments of one layer", "grad_checkpoint"],
)
def test_the_adapter_has_the_same_bits_for_one_two_and_three_nodes(
    trained: Trained, memory: MemoryConfig, dropout: float
) -> None:
    one = trained(1, memory, dropout)
    assert sha(one) == sha(trained(2, memory, dropout)) == sha(trained(3, memory, dropout))


def test_segments_train_the_adapter_that_the_whole_graph_trains(trained: Trained) -> None:
    whole = trained(1, MemoryConfig(segment_size="off", head_chunk=64))
    for memory in (
        MemoryConfig(segment_size=1, head_chunk=64),
        MemoryConfig(segment_size=2, head_chunk=5),
        MemoryConfig(segment_size="off", head_chunk=64, grad_checkpoint=True),
    ):
        assert np.linalg.norm(trained(1, memory) - whole) <= 1e-5 * np.linalg.norm(whole)
