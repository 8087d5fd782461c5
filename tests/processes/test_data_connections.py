"""Data connections that fall silent without a sign, with real sessions, engines and sockets over loopback."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxdist.node.link.jobs import Job, JobResults
from mlxdist.protocol import messages as m
from mlxdist.protocol.transport import CONTROL
from scripts.local_cluster import free_ports
from tests.faults.fault_proxy import DOWN, UP, Proxy, Seen
from tests.processes.thread_nodes import HERE, Loads, ThreadNode, config_of, start_coordinator, thread_nodes


def swallow(seen: Seen) -> None:
    """Drops this message and everything after it on its connection, in its direction; no end is told."""
    seen.dropped = seen.last = True


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("direction", "sight"),
    [
        (UP, m.LeafAnswer),
        pytest.param(DOWN, m.Assignment, marks=pytest.mark.slow),
        pytest.param(UP, m.VectorBlock, marks=pytest.mark.slow),
        pytest.param(DOWN, m.Credit, marks=pytest.mark.slow),
    ],
)
def test_a_data_connection_that_falls_silent_in_one_direction_is_made_again_without_loading_the_model(
    direction: str, sight: type[m.Message], model: Path
) -> None:
    port = free_ports()
    proxy = Proxy(port).start()
    coordinator = start_coordinator(config_of(model), port, data_seconds=0.5)
    try:
        with thread_nodes(("a", HERE, proxy.ports[CONTROL])) as (node,):
            coordinator.send_adapter()
            coordinator.fleet.wait_for_nodes(1, 1, 60.0)
            whole = coordinator.gradient().tobytes()
            silent = proxy.when(direction, lambda message: isinstance(message, sight), swallow)
            assert coordinator.gradient(2).tobytes() == whole
            assert silent.fired.is_set()
            assert "its data connection gave no sign for" in coordinator.sentences
            assert isinstance(node.engine, Loads)
            assert node.engine.loaded == 1
            assert not proxy.saw(DOWN, m.Restart)
            assert len({hello.session for hello in proxy.saw(UP, m.Hello)}) >= 2
            coordinator.fleet.close("the test is over")
    finally:
        proxy.close()
    assert not proxy.errors


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_worker_whose_first_words_are_swallowed_makes_another_connection(model: Path) -> None:
    """The coordinator does not know the connection yet, and cannot ask on it."""
    port = free_ports()
    proxy = Proxy(port).start()
    coordinator = start_coordinator(config_of(model), port)
    silent = proxy.when(UP, lambda message: isinstance(message, m.Hello), swallow)
    try:
        with thread_nodes(("a", HERE, proxy.ports[CONTROL])):
            coordinator.fleet.wait_for_nodes(1, 1, 60.0)
            assert silent.fired.is_set()
            assert not proxy.saw(DOWN, m.Restart)
            coordinator.fleet.close("the test is over")
    finally:
        proxy.close()


class SlowEngine(Loads):
    """An engine that takes a while for each job."""

    def perform(self, job: Job, session: m.SessionId, progress: Callable[[str], None]) -> JobResults:
        threading.Event().wait(0.8)
        yield from super().perform(job, session, progress)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_worker_that_loads_or_computes_for_long_is_not_taken_for_dead(model: Path) -> None:
    """Its other thread answers."""
    port = free_ports()
    coordinator = start_coordinator(config_of(model), port, data_seconds=0.4)
    node = ThreadNode("a", HERE, port, SlowEngine())
    try:
        coordinator.send_adapter()
        coordinator.fleet.wait_for_nodes(1, 1, 60.0)
        coordinator.gradient()
        assert "gave no sign" not in coordinator.sentences
        coordinator.fleet.close("the test is over")
    finally:
        node.close()
