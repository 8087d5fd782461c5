"""A fleet in one process with real engines, and rows of a list, for laws about whole runs."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlxdist.coordinator.cluster.audit import Audit
from mlxdist.coordinator.cluster.events import NodeNews
from mlxdist.coordinator.config.run_spec import run_spec
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.memory.node_memory import NodeMemory
from mlxdist.coordinator.methods.kinds import Sft
from mlxdist.coordinator.train import Run, train
from mlxdist.coordinator.training.adamw import no_moments
from mlxdist.coordinator.training.initial_adapter import draw
from mlxdist.coordinator.training.state import State
from mlxdist.node.work.engine import Engine
from mlxdist.protocol.leaves import Row
from mlxdist.protocol.vectors import Vector
from tests.coordinator.cluster.scripted_node import new_cluster
from tests.coordinator.training.silent import Silent
from tests.memory_cluster import RunningCluster


@contextmanager
def memory_cluster(
    config: RunConfig,
    engines: Sequence[Engine],
    on_news: Callable[[NodeNews], None] = lambda news: None,
    *,
    memory: NodeMemory | None = None,
) -> Iterator[tuple[Fleet, RunningCluster]]:
    """A fleet with one node per engine, and its cluster; an engine keeps its model from one fleet to the next.

    `memory` is what a node must hold; None: unknown.
    """
    nodes = RunningCluster()
    cluster = new_cluster(spec=run_spec(config), memory=memory or NodeMemory())
    nodes.coordinate(cluster, on_news, Audit(config.train.audit, config.batch.seed))
    for engine in engines:
        nodes.join(engine)
    try:
        yield nodes.fleet, nodes
    finally:
        nodes.fleet.close("the test is over")


@contextmanager
def memory_fleet(config: RunConfig, engines: Sequence[Engine]) -> Iterator[Fleet]:
    """The fleet of `memory_cluster` alone."""
    with memory_cluster(config, engines) as (fleet, _):
        yield fleet


def train_sft(config: RunConfig, fleet: Fleet, nodes: int, items: "ListRows", told: Silent) -> State:
    """The state after all steps of a run of SFT that begins with a drawn adapter."""
    vector = draw(fleet.wait_for_model().manifest, config.batch.seed)
    fleet.send_adapter(0, vector)
    fleet.wait_for_nodes(nodes, nodes, 0.0)
    loop = Run(config, Sft(config, items, None), items, told, config.train.steps, fleet, told, told)  # type: ignore[arg-type]
    return train(loop, State(vector, no_moments(len(vector))))


def adapter_of(config: RunConfig, engines: Sequence[Engine], rows: Sequence[Row]) -> Vector:
    """The adapter after all steps of a run of SFT on these rows, with a node for each engine."""
    with memory_fleet(config, engines) as fleet:
        state = train_sft(config, fleet, len(engines), ListRows(rows), Silent())
    return state.adapter


def sha(vector: Vector) -> str:
    """The SHA-256 of a vector's bytes."""
    return hashlib.sha256(vector.tobytes()).hexdigest()


@dataclass(frozen=True)
class ListRows:
    """Rows of a list: what the order, the leaves and the loop need of data."""

    items: Sequence[Row]

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        return np.array([len(row.ids) for row in self.items], np.int32)

    @property
    def labels(self) -> None:
        return None

    def __len__(self) -> int:
        return len(self.items)

    def rows(self, index: int) -> tuple[Row, ...]:
        return (self.items[index],)

    def where(self, index: int) -> str:
        return f"list:{index + 1}"


def make_row(row_id: int, ids: Sequence[int], prompt_len: int) -> Row:
    """A row whose targets are the tokens after the prompt."""
    targets = np.array([int(i >= max(prompt_len, 1)) for i in range(len(ids))], np.uint8)
    return Row(row_id, np.array(ids, np.int32), targets)
