"""Encrypted runs between network namespaces: beside strangers on the same switch, and by the commands people type."""

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlxdist.coordinator.config.hosts import local_hosts
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.run import run
from tests.faults.fault_runs import CALM, config_of, sha
from tests.faults.namespaces import COORDINATOR, PORT, OfficeNodes, office_nodes, why_not
from tests.faults.test_network_faults import Watched, meanwhile, node_news

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
STRANGER = "10.77.0.4"  # the address of s
TIMING = replace(CALM, return_seconds=1.0)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OfficeNodes]:
    """Nodes a and b, and the Mac s of a stranger on the same switch."""
    if reason := why_not():
        pytest.skip(reason)
    with office_nodes(tmp_path_factory.mktemp("nodes"), "a", "b", others=("s",)) as nodes:
        yield nodes


def kto(model: Path, folder: Path) -> RunConfig:
    return config_of(model, folder, "kto", steps=9, timing=TIMING)


@pytest.fixture(scope="module")
def on_loopback(model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The SHA-256 of the adapter of the same run on this machine, without encryption."""
    folder = tmp_path_factory.mktemp("loopback") / "run"
    assert run(kto(model, folder), local_hosts(2), resume=False, environ={"MLXDIST_PLAIN": "1"}) == 0
    return sha(folder)


def knock(nodes: OfficeNodes, port: int) -> list[socket.socket]:
    """Connects from the stranger's Mac as browsers, scanners and half-open connections do; returns the open ones."""
    with nodes.office.inside("s"):
        for sent in (b"GET / HTTP/1.1\r\n\r\n" * 9, b"\x16\x03\x01\x02\x00" * 30, b""):
            with socket.create_connection((COORDINATOR, port), 20) as one:
                one.sendall(sent)
        return [socket.create_connection((COORDINATOR, port), 20) for _ in range(150)]


def test_strangers_change_no_bit_of_an_encrypted_run(
    nodes: OfficeNodes, on_loopback: str, model: Path, tmp_path: Path
) -> None:
    """A wrong key, another node's name, no encryption, HTTP, TLS, half-open connections; and a node that is killed."""
    folder, halves = tmp_path / "run", list[socket.socket]()

    def attack(watched: Watched) -> None:
        watched.steps(2)
        nodes.end("b")  # so that the run goes on when the strangers have done all that they can
        nodes.start("s")  # with a key that was not admitted
        halves.extend(half for port in (PORT, PORT + 1) for half in knock(nodes, port))
        watched.until(lambda: f"mlxdist nodes admit s {nodes.public('s')}" in nodes.log("s"), "wrong key: a sentence")
        nodes.end("s")
        nodes.start("s", "--insecure-lan")
        watched.until(lambda: "takes encrypted connections only" in nodes.log("s"), "no encryption: a sentence")
        nodes.end("s")
        nodes.start("s", called="b", home="a")
        watched.until(lambda: "its key belongs to the node a" in nodes.log("s"), "another name: a sentence")
        watched.until(lambda: nodes.processes["s"].poll() == 1, "the end of the thief")
        nodes.start("s")
        nodes.start("b")

    with meanwhile(folder, attack):
        assert nodes.train(kto(model, folder), 2) == 0
    nodes.end("s")
    for half in halves:
        half.close()
    assert sha(folder) == on_loopback
    refused = re.findall(rf"{STRANGER} was refused", (folder / "logs" / "coordinator.log").read_text())
    assert 1 <= len(refused) <= 2, "one line for each minute"
    assert {line.split()[0] for line in node_news(folder)} <= {"a", "b"}


def test_waiting_nodes_trust_a_run_that_is_resumed_although_the_key_of_the_mac_has_changed(
    nodes: OfficeNodes, model: Path, tmp_path: Path
) -> None:
    folder, whole = tmp_path / "run", tmp_path / "whole"
    assert nodes.train(config_of(model, whole, "sft", steps=4, timing=TIMING), 2) == 0
    assert nodes.train(config_of(model, folder, "sft", steps=2, timing=TIMING), 2) == 0
    key = nodes.store.folder / "coordinator.key"
    kept = key.rename(key.with_name("kept"))
    try:
        assert nodes.train(config_of(model, folder, "sft", steps=4, timing=TIMING), 2, resume=True) == 0
        assert not key.exists(), "a resumed run needs no other key than its own"
    finally:
        kept.replace(key)
    assert sha(folder) == sha(whole)


def mlxdist(nodes: OfficeNodes, where: str, *words: str) -> str:
    """Types a command on a Mac of the office. Returns what it prints."""
    place = nodes.office.node(where) if where != "coordinator" else nodes.office.coordinator
    command = ["ip", "netns", "exec", place, sys.executable, "-m", "mlxdist", *words]
    done = subprocess.run(command, env=nodes.environment(where), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def launchable(nodes: OfficeNodes, model: Path, tmp_path: Path) -> Callable[..., str]:
    """Launches a short run with these [[nodes]] by the command line. Returns what it prints."""
    config = config_of(model, tmp_path / "run", "sft", steps=2)
    lines = f'model = "{config.model}"\noutput = "run"\ndata = "{config.data.path}"\n[train]\nsteps = 2\n'
    (tmp_path / "run.toml").write_text(lines)

    def launch(listed: str, *options: str, bind: str = COORDINATOR) -> str:
        listens = f'[coordinator]\nbind = "{bind}"\nport = {PORT}\n'
        (tmp_path / "hosts.toml").write_text(f'run = "run.toml"\n{listed}\n{listens}')
        return mlxdist(nodes, "coordinator", "launch", "--hosts", str(tmp_path / "hosts.toml"), *options)

    return launch


def test_a_mac_joins_by_the_commands_that_are_printed(
    nodes: OfficeNodes, launchable: Callable[..., str], tmp_path: Path
) -> None:
    """From no key to a training, with what `mlxdist key`, `mlxdist nodes admit` and `mlxdist launch` print."""
    for name in ("a", "b"):
        nodes.end(name)
    said = mlxdist(nodes, "s", "key")
    (key,) = re.findall(r"mlxdist nodes admit \S+ (.*)", said)
    said = mlxdist(nodes, "coordinator", "nodes", "admit", "newcomer", key)
    (options,) = re.findall(r"mlxdist node (.*)", said)
    nodes.start("s", *options.replace("HOST:PORT", f"{COORDINATOR}:{PORT}").split())
    said = launchable("nodes = []")
    assert f"mlxdist node --connect {COORDINATOR}:{PORT} --coordinator {nodes.store.coordinator_pair().public}" in said
    assert "newcomer: connected" in said
    assert "newcomer" in mlxdist(nodes, "coordinator", "nodes")
    assert (tmp_path / "run" / "adapters.safetensors").is_file()


def test_nodes_on_this_machine_have_keys_too_and_no_secret_is_written_anywhere(
    nodes: OfficeNodes, launchable: Callable[..., str], tmp_path: Path
) -> None:
    for name in list(nodes.processes):
        nodes.end(name)  # a waiting one would take the place of a new one
    said = launchable('nodes = [{host = "localhost"}, {host = "localhost"}]')
    assert "localhost: connected" in said
    texts = [said, *(path.read_text(errors="replace") for path in (tmp_path / "run").rglob("*.[ljt]*"))]
    keys = [path for path in [*nodes.logs.rglob("*.key"), *tmp_path.rglob("*.key")] if path.is_file()]
    assert len(keys) >= 3
    for path in keys:
        found = re.search(r'"secret": "([0-9a-f]{64})"', path.read_text())
        assert found is not None
        assert not any(found[1] in text for text in texts)


def link_local_address(nodes: OfficeNodes) -> str:
    """The link-local address of the coordinator, as soon as its system has made sure that no other Mac has it."""
    for _ in range(300):
        shown = json.loads(nodes.office.ip("coordinator", "-6", "-j", "addr", "show", "dev", "office", "scope", "link"))
        found = [each for one in shown for each in one.get("addr_info", ())]
        if not found or "tentative" not in found[0]:
            break
        threading.Event().wait(0.1)
    return str(found[0]["local"]) if found else ""


def test_a_link_local_address_with_its_zone_is_bound_and_reached(
    nodes: OfficeNodes, launchable: Callable[..., str], tmp_path: Path
) -> None:
    """As Macs on a cable without a router have it; each end names the interface by its own name."""
    local = link_local_address(nodes)
    if not local:
        pytest.skip("this system gives no link-local IPv6 address")
    for name in list(nodes.processes):
        nodes.end(name)
    nodes.start("a", connect=f"[{local}%eth0]:{PORT}")
    said = launchable("nodes = []", bind=f"{local}%office")
    assert f"mlxdist node --connect [{local}%INTERFACE]:{PORT}" in said
    assert "a: connected" in said


def test_without_encryption_both_sides_say_what_that_means(nodes: OfficeNodes, launchable: Callable[..., str]) -> None:
    """A node with keys, which expects an encrypted run, does not work for it."""
    for name in list(nodes.processes):
        nodes.end(name)
    nodes.start("a", "--insecure-lan")
    nodes.start("b")
    said = launchable("nodes = []", "--insecure-lan")
    meaning = "everyone on the network can read the training data"
    assert meaning in " ".join(said.split())
    assert f"mlxdist node --connect {COORDINATOR}:{PORT} --insecure-lan" in said
    assert "a: connected" in said
    assert "b: connected" not in said
    assert meaning in nodes.log("a")
