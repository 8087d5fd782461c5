"""The laws of training hold for hybrid models in chunks: the same bits on all nodes, the adapter of mlx-lm's form."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from mlx_lm.utils import save_model

from mlxdist.coordinator.config.schema import BatchConfig, DataConfig, LoraConfig, MemoryConfig, RunConfig, TrainConfig
from mlxdist.node.work.engine import Engine
from mlxdist.protocol.vectors import Vector
from scripts.tiny_architectures import VOCABULARY, tiny_config, tiny_model
from tests.laws.memory_fleet import adapter_of, make_row, sha
from tests.laws.preference_cases import case_of
from tests.laws.preference_runs import train_here

pytestmark = pytest.mark.slow

CHUNKED = MemoryConfig(segment_size="off", head_chunk=64)
SEGMENTS = MemoryConfig(segment_size=1, head_chunk=64)
RECURRENT = MemoryConfig(segment_size="off", head_chunk=64, gated_delta="recurrent")
LENGTHS = (5, 150, 3, 70, 64, 65)  # of the rows: within a chunk, at its border, three chunks

Trained = Callable[[int, MemoryConfig], Vector]


@pytest.fixture(scope="module", params=["qwen3_next", "kimi_linear"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model, as mlx-lm loads it."""
    folder = tmp_path_factory.mktemp(request.param)
    save_model(folder, tiny_model(request.param))
    (folder / "config.json").write_text(json.dumps(tiny_config(request.param)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    return [Engine() for _ in range(3)]


@pytest.fixture(scope="module")
def trained(hybrid: Path, engines: list[Engine]) -> Trained:
    @cache
    def run(nodes: int, memory: MemoryConfig) -> Vector:
        random = np.random.default_rng(1)
        rows = [make_row(i, random.integers(0, VOCABULARY, n).tolist(), 1) for i, n in enumerate(LENGTHS)]
        config = RunConfig(
            model=str(hybrid),
            output=Path("none"),
            data=DataConfig(path="none"),
            batch=BatchConfig(size=6),
            lora=LoraConfig(rank=4, target_modules="all-linear"),
            train=TrainConfig(steps=2, learning_rate=1e-2, eval_every=0),
            memory=memory,
        )
        return adapter_of(config, engines[:nodes], rows)

    return run


def test_the_adapter_has_the_same_bits_for_one_two_and_three_nodes(trained: Trained) -> None:
    assert sha(trained(1, CHUNKED)) == sha(trained(2, CHUNKED)) == sha(trained(3, CHUNKED))
    assert sha(trained(1, SEGMENTS)) == sha(trained(2, SEGMENTS))


def test_the_adapter_is_that_of_the_recurrent_form_and_the_form_is_seen_in_its_bits(trained: Trained) -> None:
    recurrent = trained(1, RECURRENT)
    for memory in (CHUNKED, SEGMENTS):
        chunked = trained(1, memory)
        assert np.linalg.norm(chunked - recurrent) < 1e-3 * np.linalg.norm(recurrent)
        assert sha(chunked) != sha(recurrent)


def test_the_rewards_of_a_first_dpo_step_are_exactly_zero(hybrid: Path, engines: list[Engine]) -> None:
    ran = train_here(case_of("sigmoid", fresh=True, total_steps=1), hybrid, engines[:2])
    assert [ran.steps[0].metrics[f"rewards/{side}"] for side in ("chosen", "rejected")] == [0.0, 0.0]
