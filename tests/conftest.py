"""The environment that must be set before any test imports mlx, and the marker `mac`."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from mlxdist.node.work.blas import use_openblas
from tests.processes.node_pools import Pools, node_pools

if TYPE_CHECKING:
    from tests.faults.fault_nodes import FaultNodes
    from tests.faults.fault_runs import Undisturbed
    from tests.faults.forked_coordinator import Coordinators
    from tests.processes.bed_cluster import BedCluster

# One thread and no TF32: with more threads, or with TF32, the same sum has other bits.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MLX_ENABLE_TF32"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"  # a test reads folders only
use_openblas()

# A slow machine is no failure, and in CI the same commit gets the same cases.
settings.register_profile("mlxdist", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("mlxdist")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests with real processes in one worker: they share nodes, and two at once would disturb each other."""
    for item in items:
        if item.path.parent.name in ("faults", "processes", "project"):
            item.add_marker(pytest.mark.xdist_group("processes"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs macOS on other systems."""
    if sys.platform != "darwin" and item.get_closest_marker("mac") is not None:
        pytest.skip("needs macOS")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random llama with its tokenizer, float32."""
    from tests.laws.model_folder import llama_folder  # brings mlx, which no quick test of the coordinator needs

    return llama_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Coordinators]":
    """Starts coordinators over two nodes, a and b, which a person would have started by hand."""
    from tests.faults.fault_nodes import fault_nodes
    from tests.faults.forked_coordinator import coordinators
    from tests.processes.node_pools import start_node

    folder = tmp_path_factory.mktemp("launcher")
    with fault_nodes(folder) as nodes, coordinators(folder, nodes) as launcher:
        for name in ("a", "b"):
            nodes.processes[name] = start_node(nodes.port, name, nodes.logs)
        yield launcher


@pytest.fixture(scope="session")
def cluster(model: Path) -> "Iterator[BedCluster]":
    """Four Macs in namespaces, each with a real sshd, an environment and the model: `mlxdist sync` has made both."""
    from scripts.cluster_bed import why_not
    from tests.processes.bed_cluster import bed_cluster

    if reason := why_not():
        pytest.skip(reason)
    with bed_cluster(model) as made:
        yield made


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    """Pools of real nodes, each started when it is first asked for."""
    with node_pools(tmp_path_factory.mktemp("pools")) as pools:
        yield pools


@pytest.fixture(scope="session")
def all_fault_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator["FaultNodes"]:
    """Nodes behind proxies for the whole session, each started when a test first names it."""
    from tests.faults.fault_nodes import fault_nodes

    with fault_nodes(tmp_path_factory.mktemp("nodes")) as nodes:
        yield nodes


@pytest.fixture
def nodes(all_fault_nodes: "FaultNodes") -> Iterator["FaultNodes"]:
    """Nodes that a test may hurt; a test says first which ones are `ready`."""
    yield all_fault_nodes
    all_fault_nodes.check()


@pytest.fixture(scope="session")
def undisturbed(all_fault_nodes: "FaultNodes", model: Path, tmp_path_factory: pytest.TempPathFactory) -> "Undisturbed":
    """The SHA-256 of the adapter of a run that nothing happened to, by method."""
    from tests.faults.fault_runs import Undisturbed

    return Undisturbed(all_fault_nodes, model, tmp_path_factory.mktemp("undisturbed"))
