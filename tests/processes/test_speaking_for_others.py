"""A stranger that has heard every frame of a node speaks under its name, in its session, on another or on its own
connection: no bit changes, and the node goes on.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlxdist.protocol import messages as m
from mlxdist.protocol.transport import CONTROL, DATA
from mlxdist.protocol.wire import encode
from scripts.local_cluster import free_ports
from tests.faults.fault_nodes import FaultNodes
from tests.faults.fault_proxy import DOWN, Proxy
from tests.faults.fault_runs import Undisturbed, config_of, sha, told, train
from tests.processes import thread_nodes as threads
from tests.processes.thieves import Repeated, Wiretap

MOST_STEPS = 400
RECORDED = 300  # frames that are said again


@dataclass
class Victim:
    """A node at work, alone, and the stranger that listens to it."""

    coordinator: threads.Coordinator
    node: threads.ThreadNode
    tap: Wiretap
    whole: bytes  # of the undisturbed gradient
    step: int = 1

    def works_while(self, attack: Repeated) -> None:
        """Computes gradients, each with the right bits, until the attack was done a few times."""
        with attack:
            while attack.times < 3 and not attack.errors:
                self.step += 1
                assert self.step < MOST_STEPS
                assert self.coordinator.gradient(self.step).tobytes() == self.whole

    @property
    def loaded(self) -> int:
        """The number of times that it has loaded its model."""
        assert isinstance(self.node.engine, threads.Loads)
        return self.node.engine.loaded


@pytest.fixture
def victim(model: Path) -> Iterator[Victim]:
    port = free_ports()
    proxy = Proxy(port).start()
    coordinator = threads.start_coordinator(threads.config_of(model), port)
    tap = Wiretap(proxy, coordinator.hub.ports).listen()
    with threads.thread_nodes(("a", threads.HERE, proxy.ports[CONTROL])) as (node,):
        coordinator.send_adapter()
        coordinator.fleet.wait_for_nodes(1, 1, 60.0)
        yield Victim(coordinator, node, tap, coordinator.gradient().tobytes())
        coordinator.fleet.close("the test is over")
    tap.close()
    proxy.close()
    assert not proxy.errors


def own_name(tap: Wiretap, channel: str) -> bytes:
    """The name of the node's own connection, as a listener knows it."""
    return f"a#{tap.session.number}.0".encode() if channel == DATA else f"a/{os.getpid()}".encode()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("channel", "own"),
    [(CONTROL, False), (DATA, False), (DATA, True)],
    ids=["control", "data", "data under its own name"],
)
def test_who_repeats_or_forges_the_words_of_a_node_changes_nothing(victim: Victim, channel: str, own: bool) -> None:
    tap, session = victim.tap, victim.tap.session
    attack = Repeated(
        lambda: tap.say(channel, own_name(tap, channel) if own else b"thief", *tap.frames[-RECORDED:], *tap.forgeries())
    )
    victim.works_while(attack)
    node = victim.coordinator.cluster.nodes["a"]
    assert (node.session, node.worker.ended, victim.loaded) == (session, False, 1)
    assert not victim.tap.proxy.saw(DOWN, m.Restart)
    assert "forged" not in victim.coordinator.sentences
    assert own != bool(tap.answers), "a second connection of the same name is not heard, any other is answered"
    assert {type(answer) for answer in tap.answers} <= {m.Stale, m.Reject}
    assert not victim.coordinator.cluster.offenders.errors


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_node_whose_control_connection_was_taken_gets_it_back_and_keeps_its_model(victim: Victim) -> None:
    """The name of that connection is random and known to no stranger; one that knows it costs the node a session."""
    tap = victim.tap
    for _ in range(3):
        tap.say(CONTROL, own_name(tap, CONTROL), encode(m.Leave(tap.session)))
        victim.coordinator.fleet.wait_for_nodes(1, 1, 60.0)
        victim.step += 1
        assert victim.coordinator.gradient(victim.step).tobytes() == victim.whole
    assert victim.loaded == 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize("facts", [{}, {"host": "elsewhere"}], ids=["no host", "another host"])
def test_a_name_is_not_given_to_a_second_node_while_the_first_one_takes_part(
    victim: Victim, facts: dict[str, str]
) -> None:
    session = victim.tap.session
    registers = encode(m.Register(m.PROTOCOL_VERSION, "a", 0, facts))
    victim.works_while(Repeated(lambda: victim.tap.say(CONTROL, b"thief", registers)))
    assert victim.coordinator.cluster.nodes["a"].session == session
    assert not [answer for answer in victim.tap.answers if isinstance(answer, m.Accept)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_whose_nodes_are_impersonated_has_the_adapter_of_an_undisturbed_one(
    nodes: FaultNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    """Real processes: two nodes, and strangers that repeat and forge the words of both on both ports."""
    folder, expected = tmp_path / "run", undisturbed("kto")
    nodes.ready("a", "b")
    ports = {CONTROL: nodes.port, DATA: nodes.port + 1}
    taps = [Wiretap(nodes.proxies[name], ports).listen() for name in ("a", "b")]

    def attack() -> None:
        for name, tap in zip("ab", taps, strict=True):
            if tap.proxy.saw(DOWN, m.VectorOffer) and tap.proxy.saw(DOWN, m.Assignment):
                words = [*tap.frames[-RECORDED:], *tap.forgeries()]
                for channel, identity in (
                    (CONTROL, b"thief"),
                    (DATA, b"thief"),
                    (DATA, f"{name}#{tap.session.number}.0".encode()),
                ):
                    tap.say(channel, identity, *words)

    with Repeated(attack) as repeated:
        assert train(config_of(model, folder, "kto", steps=6), nodes.port) == 0
    for tap in taps:
        tap.close()
    assert repeated.times >= 1
    assert sha(folder) == expected
    for words in ("forged", " dead ", "restarted", "go to others"):
        assert words not in told(folder)
