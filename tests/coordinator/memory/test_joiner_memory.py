"""A node that is too small for the run is refused with the reason, and the run continues as before."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlxdist.coordinator.cluster.events import NodeNews
from mlxdist.coordinator.config.hosts import local_hosts
from mlxdist.coordinator.config.schema import BatchConfig, DataConfig, LoraConfig, MemoryConfig, RunConfig, TrainConfig
from mlxdist.coordinator.memory.fit import Machine, fit
from mlxdist.coordinator.memory.node_memory import NodeMemory
from mlxdist.node.work.engine import Engine
from tests.coordinator.training.watched import Recorder
from tests.laws.memory_fleet import ListRows, make_row, memory_cluster, train_sft
from tests.laws.model_folder import VOCABULARY
from tests.memory_cluster import MemoryCluster
from tests.memory_nodes import MemoryNode

GB = 10**9
LARGE = {"memory_bytes": str(64 * GB), "system": "Darwin 24.1"}
SMALL = {"memory_bytes": str(GB // 2), "system": "Darwin 24.1"}  # two thirds of it are less than a worker's own 0.4 GB


@pytest.fixture
def config(model: Path, tmp_path: Path) -> RunConfig:
    return RunConfig(
        model=str(model),
        output=tmp_path,
        data=DataConfig(path="none"),
        batch=BatchConfig(size=4),
        lora=LoraConfig(rank=4),
        train=TrainConfig(steps=4, learning_rate=1e-2, eval_every=0),
        memory=MemoryConfig(segment_size=1, head_chunk=8),
    )


def rows() -> ListRows:
    draw_ids = np.random.default_rng(1)
    return ListRows([make_row(i, draw_ids.integers(0, VOCABULARY, 9 + i).tolist(), 3) for i in range(8)])


def trained(
    config: RunConfig, memory: NodeMemory, joiner: dict[str, str] | None
) -> tuple[str, MemoryNode | None, list[NodeNews]]:
    """Returns the SHA-256 of the adapter after a run of one node that `joiner` asks to join before the third step."""
    recorder, joined, news = Recorder(), list[MemoryNode](), list[NodeNews]()
    with memory_cluster(config, [Engine()], news.append, memory=memory) as (fleet, nodes):

        def before(step: int, nodes: MemoryCluster = nodes) -> None:
            if step == 3 and joiner is not None:
                joined.append(nodes.join(Engine(), host=joiner))

        recorder.before = before
        state = train_sft(config, fleet, 1, rows(), recorder)
    return hashlib.sha256(state.adapter.tobytes()).hexdigest(), next(iter(joined), None), news


def test_a_joiner_without_the_memory_is_refused_in_a_run_that_goes_on_with_the_same_bits(config: RunConfig) -> None:
    fitted = fit(config, [rows()], local_hosts(1).nodes, Machine(64 * GB, 60 * GB, "Darwin"))
    undisturbed, _, _ = trained(fitted.config, fitted.memory, None)

    sha, small, news = trained(fitted.config, fitted.memory, SMALL)
    assert small is not None
    assert small.refusal.startswith("node-1 may use 333 MB, and the run needs 40")
    assert small.session is None  # no worker was started, so no model was loaded
    assert [(item.name, item.state) for item in news if item.state == "refused"] == [("node-1", "refused")]
    assert sha == undisturbed

    sha, large, news = trained(fitted.config, fitted.memory, LARGE)
    assert large is not None
    assert large.refusal == ""
    assert large.session is not None
    assert sha == undisturbed


def test_no_node_is_refused_when_the_need_is_not_known(config: RunConfig) -> None:
    _, small, _ = trained(replace(config), NodeMemory(), SMALL)
    assert small is not None
    assert small.session is not None
