"""The model over a link of 20 Mbit/s that is cut once: a Mac without it joins, with the bits of one machine."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlxdist.coordinator.config.hosts import local_hosts
from mlxdist.coordinator.run import run
from tests.faults.fault_runs import CALM, config_of, events, sha
from tests.faults.namespaces import ADDRESS, OfficeNodes, office_nodes, why_not

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
VOCABULARY = 24_000  # rows of 32 float32, twice: 6 MB, 2.5 s at 20 Mbit/s
MBIT = 20.0


@pytest.fixture
def macs(tmp_path: Path) -> Iterator[OfficeNodes]:
    if reason := why_not():
        pytest.skip(reason)
    with office_nodes(tmp_path, others=("near", "far")) as macs:
        yield macs


@pytest.fixture
def large_model(tmp_path: Path) -> Path:
    from tests.laws.model_folder import llama_folder

    return llama_folder(tmp_path / "model", vocabulary=VOCABULARY)


def start_without(macs: OfficeNodes, name: str, model: Path) -> None:
    """Starts a node on a Mac on whose disk the model's folder is empty."""
    macs.admit(name)
    node = [sys.executable, "-m", "mlxdist", "node", "--connect", ADDRESS, "--wait", "20m", "--name", name]
    trust = ["--coordinator", macs.store.coordinator_pair().public]
    hidden = ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(model)]  # for this namespace alone
    with (macs.logs / f"{name}.txt").open("ab") as log:
        macs.processes[name] = subprocess.Popen(
            ["ip", "netns", "exec", macs.office.node(name), *hidden, *node, *trust],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=macs.environment(name),
        )


def test_a_mac_without_the_model_gets_it_over_a_slow_link_that_is_cut_once(
    macs: OfficeNodes, large_model: Path, tmp_path: Path
) -> None:
    """The run waits for both nodes, so the far one has to get it; its cable is cut in the middle, for a second."""
    timing = replace(CALM, beat_seconds=0.2, data_seconds=1.0)
    config = config_of(large_model, tmp_path / "run", "sft", steps=2, timing=timing)
    macs.office.slow("far", MBIT)
    macs.admit("near")
    macs.start("near")
    start_without(macs, "far", large_model)
    cut, over = threading.Event(), threading.Event()

    def cut_once() -> None:
        while macs.office.bytes_sent("far", "down") < 3e6 and not over.wait(0.05):
            pass
        macs.office.cut("far")
        cut.set()
        over.wait(2.0)
        macs.office.restore("far")
        macs.office.slow("far", MBIT)

    thread = threading.Thread(target=cut_once)
    thread.start()
    try:
        assert macs.train(config, 2) == 0, macs.log("far")
    finally:
        over.set()
        thread.join()
    assert cut.is_set()
    (copy,) = (macs.home("far") / "mlxdist" / "models").iterdir()
    for path in large_model.iterdir():
        assert (copy / path.name).read_bytes() == path.read_bytes()
    told = "\n".join(str(event.get("message")) for event in events(config.output, "node"))
    assert "it gets 6.2 MB from here" in told
    assert "of the model's files are on this disk already" in told, told
    alone = replace(config, output=tmp_path / "alone")
    assert run(alone, local_hosts(1), resume=False, environ={"MLXDIST_PLAIN": "1"}) == 0
    assert sha(config.output) == sha(alone.output)
