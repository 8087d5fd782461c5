"""The laws of packed leaves: the same bits for every number of nodes and in every method, one mode for all nodes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlxdist.coordinator.cluster.events import NodeNews
from mlxdist.coordinator.config.schema import BatchConfig, DataConfig, LoraConfig, RunConfig
from mlxdist.node.backward.choose_packing import PackingChoice
from mlxdist.node.work.engine import Engine
from mlxdist.node.work.model import LoadedModel
from mlxdist.protocol.messages import RunSpec
from mlxdist.protocol.packing import APART, PACKED
from tests.coordinator.training.watched import Watched
from tests.laws.memory_fleet import memory_cluster
from tests.laws.preference_cases import BATCH, case_of, labeled, pairs
from tests.laws.preference_runs import Case, train_here

PACKED_BATCH = replace(BATCH, size=7, leaf_tokens=70)


@pytest.fixture(scope="module")
def engines() -> list[Watched]:
    return [Watched() for _ in range(5)]


def case(method: str) -> Case:
    if method == "orpo":
        return Case(rows=pairs(), loss="orpo", method="orpo", batch=PACKED_BATCH, total_steps=2)
    if method == "kto":
        return case_of("kto", PACKED_BATCH, rows=labeled(), total_steps=2)
    return case_of("sigmoid", PACKED_BATCH, total_steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "kto", "orpo"])
def test_packed_leaves_give_the_same_bits_on_one_two_three_and_five_nodes(
    method: str, model: Path, engines: list[Watched]
) -> None:
    one = train_here(case(method), model, engines[:1])
    for nodes in (2, 3, 5):
        many = train_here(case(method), model, engines[:nodes])
        assert many.sha == one.sha
        assert [step.metrics for step in many.steps] == [step.metrics for step in one.steps]


@pytest.mark.parametrize("leaf_tokens", [70, 1000])
@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_the_first_step_with_shared_prompts_has_rewards_of_exactly_0(
    method: str, leaf_tokens: int, model: Path, engines: list[Watched]
) -> None:
    batch = replace(PACKED_BATCH, leaf_tokens=leaf_tokens)
    ran = train_here(replace(case(method), batch=batch, fresh=True, total_steps=1), model, engines[:1])
    rewards = {name: value for name, value in ran.steps[0].metrics.items() if name.startswith("rewards/")}
    assert rewards
    assert set(rewards.values()) == {0.0}


class Weaker(Engine):
    """An engine whose model is said not to allow packed rows."""

    def _load(self, spec: RunSpec, progress: Callable[[str], None]) -> LoadedModel:
        loaded = replace(super()._load(spec, progress), packing=PackingChoice(APART))
        assert self._computer is not None
        self._computer = replace(self._computer, loaded=loaded)
        return loaded


def test_where_one_node_cannot_pack_all_nodes_compute_each_row_alone_and_that_is_said(
    model: Path, tmp_path: Path
) -> None:
    config = RunConfig(
        model=str(model),
        output=tmp_path,
        data=DataConfig(path="none"),
        batch=BatchConfig(size=6, leaf_tokens=60),
        lora=LoraConfig(rank=4),
    )
    news: list[NodeNews] = []
    with memory_cluster(config, [Engine(), Weaker(), Engine()], news.append) as (fleet, nodes):
        fleet.wait_for_model()
        fleet.wait_for_nodes(3, 3, 0.0)
        assert fleet.packing() == APART
        computers = [node.engine._computer for node in nodes.nodes.values()]  # type: ignore[attr-defined]
    assert {computer.loaded.packing.mode for computer in computers} == {APART}
    assert any("node-1 computes rows apart, so all nodes do" in item.message for item in news)


def test_the_mode_changes_the_order_of_sums_and_not_what_is_learned(model: Path, engines: list[Watched]) -> None:
    together = train_here(case("dpo"), model, engines[:1])
    alone = train_here(case("dpo"), model, [Weakened()])
    distance = np.linalg.norm(alone.state.adapter - together.state.adapter)
    assert distance <= 1e-5 * np.linalg.norm(together.state.adapter)


class Weakened(Watched, Weaker):
    """A watched engine that computes each row alone."""


def test_a_model_that_is_still_loaded_is_checked_again_for_a_run_in_another_mode(model: Path, tmp_path: Path) -> None:
    config = RunConfig(
        model=str(model), output=tmp_path, data=DataConfig(path="none"), batch=BatchConfig(leaf_tokens=60)
    )
    engine = Weaker()
    with memory_cluster(config, [engine]) as (fleet, _):
        fleet.wait_for_nodes(1, 1, 0.0)
        assert fleet.packing() == APART
    plain = Engine()
    plain._computer = engine._computer
    with memory_cluster(config, [plain]) as (fleet, _):
        fleet.wait_for_nodes(1, 1, 0.0)
        assert fleet.packing() == PACKED
