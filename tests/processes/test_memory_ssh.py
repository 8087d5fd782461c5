"""The memory of a model's layers, measured on a host over a real sshd."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlxdist.coordinator.config.hosts import NodeSpec
from mlxdist.coordinator.launch.looking import look_at
from mlxdist.coordinator.launch.roster import Roster
from mlxdist.coordinator.memory.fit import Machine
from mlxdist.coordinator.memory.model_files import read_model
from mlxdist.coordinator.memory.probes import ProbeStore, probe_order, table_shape
from mlxdist.coordinator.training.measure_memory import measured_on, probe
from mlxdist.protocol.memory_probe import ProbeAnswer
from tests.coordinator.memory.test_probes import Told, config_of, rows
from tests.processes.ssh_server import ssh_server, why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.skipif(bool(why_not()), reason=why_not())]

ROOT = Path(__file__).parents[2]
SMALL = Machine(10**9, 6 * 10**8, "Linux")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeSpec]:
    """A node on a host that is reached over ssh alone."""
    folder = tmp_path_factory.mktemp("memory")
    python = folder / "python of the host"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with ssh_server(folder / "host", shell="/bin/sh") as server:
        yield NodeSpec(name="far", host="mini-1", python=str(python), ssh_options=("-F", str(server.config)))


def test_a_host_measures_over_ssh_and_is_asked_once(node: NodeSpec, model: Path, tmp_path: Path) -> None:
    """The model stands at the same path there."""
    told, store, config = Told(), ProbeStore(tmp_path), config_of(model)
    roster = Roster((node,), seen={node.name: look_at(node, str(model))})
    machines = (SMALL, {node.name: SMALL})
    found = measured_on(config, [rows()], roster, machines, store, told)  # type: ignore[arg-type]
    assert (len(found), len(told.stages), told.notes) == (1, 1, [])
    assert measured_on(config, [rows()], roster, machines, store, told) == found  # type: ignore[arg-type]
    assert len(told.stages) == 1


@pytest.mark.parametrize("printed", ["", "{}", "echo", '{\\"long\\": 1024}', "x" * 3000])
def test_what_a_host_prints_instead_is_a_reason(node: NodeSpec, model: Path, tmp_path: Path, printed: str) -> None:
    lying = tmp_path / "python"
    lying.write_text(f'#!/bin/sh\ncat > {tmp_path}/asked\necho "{printed}"\n')
    lying.chmod(0o755)
    config = config_of(model)
    order = probe_order(config, table_shape(config, read_model(model)))
    liar = replace(node, python=str(lying))
    answer = probe(liar, Roster((liar,)), model, order)
    assert not isinstance(answer, ProbeAnswer)
    assert 0 < len(answer) <= 220
    assert (tmp_path / "asked").stat().st_size > 0
