"""Runs that are found without an address: by avahi's daemons, by the library zeroconf, whichever announced them."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from mlxdist.bonjour import Service, avahi_services
from mlxdist.keys.exchange import KIND
from tests.faults.avahi_macs import avahi
from tests.faults.avahi_macs import why_not as no_avahi
from tests.faults.join_desk import Desk, Typed, code_of
from tests.faults.namespaces import OfficeNodes, office_nodes, why_not

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
ONE, ONES_SECOND, TWO = "10.77.0.2:7550", "10.77.0.2:7553", "10.77.0.3:7550"
LOOKS, LOOK_SECONDS = 60, 10.0  # each takes a second or more
LOOKS_OF_JOIN = 4


@pytest.fixture
def macs(tmp_path: Path) -> Iterator[OfficeNodes]:
    """Two Macs that launch, one and two, and two that join, a and b, with no key and nothing running."""
    if reason := why_not() or no_avahi():
        pytest.skip(reason)
    pytest.importorskip("zeroconf")
    with office_nodes(tmp_path, others=("one", "two", "a", "b")) as macs:
        yield macs


@pytest.fixture
def by_avahi(macs: OfficeNodes, tmp_path: Path) -> Iterator[Mapping[str, Mapping[str, str]]]:
    """The environment of a command that finds and announces by avahi, on one and on a."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(avahi(macs.office, name, tmp_path / f"avahi-{name}")) for name in ("one", "a")}


@pytest.fixture
def desk(macs: OfficeNodes, by_avahi: object, model: Path, tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(macs, tmp_path, model)
    yield desk
    desk.end()


def test_runs_are_found_without_an_address_by_avahi_and_by_zeroconf_whichever_announced_them(
    desk: Desk, by_avahi: Mapping[str, Mapping[str, str]], tmp_path: Path
) -> None:
    """Two coordinators, one of them with two runs: all are told. A run that is killed is announced no more."""
    words, without_avahi = ("--hosts", desk.hosts(1), "--invite"), {"PATH": str(tmp_path)}
    killed = [desk.launch(*words, where="one", name=name, **by_avahi["one"]) for name in ("first", "second")]
    launch = desk.launch(*words, where="two", name="third", **without_avahi)
    for each in (*killed, launch):
        code_of(each)

    for where, environment in (("a", by_avahi["a"]), ("b", without_avahi)):
        told = listed(desk, where, environment)
        told.until("there are 3 coordinators to choose from, so type one of: ")
        assert set(re.findall(r"mlxdist join (\S+)", told.said)) == {ONE, ONES_SECOND, TWO}
        assert f"mlxdist join {ONE} (one.local)" in told.said

    for each in killed:
        os.kill(each.process.pid, signal.SIGKILL)
    for _ in range(LOOKS):
        if [service.port for service in announced(desk, by_avahi["a"])] == [7550]:
            break
    joined = desk.type("a", "join", "--name", "a", code=code_of(launch), **by_avahi["a"])
    joined.until("keys were exchanged: this Mac is a there")
    joined.until(f"works for {TWO}, as a")
    assert launch.ends() == 0


def listed(desk: Desk, where: str, environment: Mapping[str, str]) -> Typed:
    """Returns a `mlxdist join` that has found all three, or the last of a few: a loaded machine may answer too late."""
    for _ in range(LOOKS_OF_JOIN):
        told = desk.type(where, "join", **environment)
        assert told.ends() == 2
        if "there are 3" in told.said:
            break
    return told


def announced(desk: Desk, environment: Mapping[str, str]) -> list[Service]:
    """Returns what avahi knows on a; nothing where its browser waits for ever for a service that has just gone."""
    command = ["ip", "netns", "exec", desk.macs.office.node("a"), "avahi-browse", "-rpt", KIND]
    environ = {**os.environ, **environment}
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=LOOK_SECONDS)
    except subprocess.TimeoutExpired:
        return []
    return avahi_services(done.stdout)
