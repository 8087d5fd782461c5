"""Nodes that come and go: many losses in one step, the loss of the last node, new nodes, a node that restarts often."""

import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mlxdist.protocol import messages as m
from mlxdist.protocol.messages import Message
from tests.faults.fault_nodes import FaultNodes, a
from tests.faults.fault_proxy import DOWN, UP, Seen, wait_for
from tests.faults.fault_runs import Script, Undisturbed, config_of, events, sha, told, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEP = 3  # of the fault: by then all nodes work


def is_gradient(message: Message, step: int = STEP) -> bool:
    return isinstance(message, m.Assignment) and message.verb == "gradient" and message.step == step


@dataclass
class ThreeKills:
    """Kills two workers that compute, then the third, while it computes what one of them had.

    `leaf` is then the leaf that was being computed at two kills.
    """

    nodes: FaultNodes
    tasks: dict[str, list[m.Assignment]] = field(default_factory=dict)  # the gradients of the step, as assigned
    killed: list[str] = field(default_factory=list)
    leaf: int = -1
    before: dict[str, int] = field(default_factory=dict)  # tasks of each node at the third kill
    _taken: threading.Event = field(default_factory=threading.Event)  # the third node has what another one had
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def arm(self) -> None:
        """Sets the traps, before the run."""
        for name, proxy in self.nodes.proxies.items():
            if proxy.is_online:
                proxy.when(DOWN, is_gradient, lambda seen, name=name: self._given(name, seen), once=False)
                proxy.when(
                    UP, a(m.LeafAnswer, step=STEP), lambda seen, name=name: self._answered(name, seen), once=False
                )

    def _given(self, name: str, seen: Seen) -> None:
        assert isinstance(seen.message, m.Assignment)
        with self._lock:
            self.tasks.setdefault(name, []).append(seen.message)
            if not self.killed and len(self.tasks) == 2:
                for victim in self.tasks:
                    self.nodes.kill(victim)
                    self.killed.append(victim)
            elif len(self.killed) == 2 and name not in self.killed and self._blamed() >= 0:
                self._taken.set()

    def _blamed(self) -> int:
        """The first leaf of a killed worker that the third node has, in its order of work; -1: none yet."""
        (third,) = [name for name in self.nodes.online() if name not in self.killed[:2]]
        firsts = {self.tasks[name][0].start for name in self.killed[:2]}
        return next((leaf for leaf in self._order(third) if leaf in firsts), -1)

    def _order(self, name: str) -> list[int]:
        return [leaf for task in self.tasks.get(name, []) for leaf in range(task.start, task.stop)]

    def _answered(self, name: str, seen: Seen) -> None:
        """Stops the third node just before it answers the leaf that a killed worker was computing."""
        assert isinstance(seen.message, m.LeafAnswer)
        if self.leaf >= 0:
            return  # later messages pass
        if self.nodes.task(name, seen.message).verb != "gradient":
            return
        with self._lock:
            if name in self.killed:
                seen.dropped = True  # it had sent that before it was killed
                return
        wait_for(self._taken, "the work of the two that were killed")
        with self._lock:
            leaf = self._blamed()
            order = self._order(name)
            if seen.message.leaf == leaf or order.index(seen.message.leaf) == order.index(leaf) - 1:
                self.leaf, seen.dropped, seen.last = leaf, seen.message.leaf == leaf, True
                self.before = {each: len(tasks) for each, tasks in self.tasks.items()}
                self.nodes.kill(name)
                self.killed.append(name)


def test_a_leaf_that_was_being_computed_at_two_losses_goes_to_one_node_alone(
    nodes: FaultNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    expected = undisturbed("kto")
    nodes.ready("a", "b", "c")
    kills = ThreeKills(nodes)
    kills.arm()
    assert train(config_of(model, folder, "kto"), nodes.port) == 0
    assert len(set(kills.killed)) == 3, kills
    assert "run says paused: 0 of at least 1 nodes can work; waiting for more" in told(folder)
    assert " nodes can work" in told(folder).partition("run says going on after ")[2]
    alone = [
        (name, task)
        for name in kills.killed
        for task in kills.tasks[name][kills.before[name] :]  # a node may have had one leaf of three, before
        if (task.start, task.stop) == (kills.leaf, kills.leaf + 1)
    ]
    assert alone, kills.tasks
    name, task = alone[0]
    answered = False
    for direction, message in nodes.proxies[name].journal:  # it had nothing else before the answer came
        if direction == UP and isinstance(message, m.LeafAnswer) and message.attempt == task.attempt:
            answered = True
        elif direction == DOWN and isinstance(message, m.Assignment) and message.session == task.session:
            assert message.attempt == task.attempt or answered
    assert answered
    assert sha(folder) == expected


def test_after_the_loss_of_the_last_node_the_run_waits_and_continues_with_a_new_one(
    nodes: FaultNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    expected = undisturbed("kto")
    nodes.ready("a", later=("b",))
    nodes.catch(DOWN, lambda _, message: is_gradient(message), lambda name, _: nodes.kill(name, "both"))
    with Script(folder, (lambda: "run says paused: ", nodes.proxies["b"].online)):
        assert train(config_of(model, folder, "kto"), nodes.port) == 0
    story = told(folder).splitlines()
    lost = next(i for i, line in enumerate(story) if line.startswith("a dead its connection stayed closed"))
    assert story[lost].endswith("; leaves [0, 8) go to others")
    (change,) = [event for event in events(folder, "node") if event["name"] == "a" and event["state"] == "dead"]
    assert str(change["cause"]).startswith("its connection stayed closed")
    assert (change["action"], change["leaves"]) == ("leaves [0, 8) go to others", [[0, 8]])
    paused = story.index("run says paused: 0 of at least 1 nodes can work; waiting for more")
    joined = story.index("b ready ")
    going = next(i for i, line in enumerate(story) if line.startswith("run says going on after "))
    assert lost < paused < joined < going
    assert sha(folder) == expected


def test_a_node_that_is_started_five_times_is_one_member(
    nodes: FaultNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    expected = undisturbed("kto")
    nodes.ready("a", "b")
    again = nodes.leave_the_rest_to(lambda: "b", STEP)
    proxy, starts = nodes.proxies["b"], []

    def restart(seen: Seen) -> None:
        """Kills the accepted supervisor and starts it again, five times; the sixth stays."""
        starts.append(seen.message)
        if len(starts) < 6:
            seen.dropped = seen.last = True
            threading.Thread(target=new_supervisor).start()

    def new_supervisor() -> None:
        nodes.kill("b", "both")
        nodes.start("b")

    def begin(seen: Seen) -> None:
        proxy.when(DOWN, a(m.Accept), restart, once=False)
        proxy.when(UP, lambda message: isinstance(message, m.CanaryAnswer) and len(starts) == 6, lambda _: again.set())
        new_supervisor()

    proxy.when(DOWN, lambda message: isinstance(message, m.Assignment) and message.step == STEP - 1, begin)
    assert train(config_of(model, folder, "kto"), nodes.port) == 0
    assert len(starts) == 6
    assert {event["name"] for event in events(folder, "node")} == {"a", "b"}
    (bye,) = [
        bye for bye in proxy.saw(DOWN, m.Shutdown) if bye.session in {left.session for left in proxy.saw(UP, m.Leave)}
    ][:1]
    sessions = list(dict.fromkeys(admit.session for admit in proxy.saw(DOWN, m.Accept)))
    assert bye.session == sessions[-1]
    assert sha(folder) == expected


def test_a_run_does_not_wait_for_a_new_node_that_never_finishes_loading(
    nodes: FaultNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    expected = undisturbed("kto")
    nodes.ready("a", "b", later=("c",))
    nodes.proxies["c"].online()
    loading = threading.Event()
    nodes.proxies["c"].when(DOWN, a(m.Welcome), lambda _: (nodes.stop("c", "worker"), loading.set())[0])
    for name in ("a", "b"):
        nodes.proxies[name].when(DOWN, a(m.Assignment, step=STEP), lambda _: wait_for(loading, "the joiner"))
    assert train(config_of(model, folder, "kto"), nodes.port) == 0
    lines = [line for line in told(folder).splitlines() if line.startswith("c ")]
    assert lines == ["c connecting connected", "c loading loading the model"]
    assert not nodes.proxies["c"].saw(DOWN, m.Assignment)
    assert sha(folder) == expected


def test_a_node_that_joins_during_a_run_takes_part_from_the_next_round_on(
    nodes: FaultNodes, undisturbed: Undisturbed, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    expected = undisturbed("kto")
    nodes.ready("a", "b", later=("c",))
    joiner = nodes.proxies["c"]
    again = nodes.leave_the_rest_to(lambda: "c", STEP)
    joiner.when(UP, a(m.CanaryAnswer), lambda _: again.set())
    asked: list[Message] = []  # the assignment during which it connects

    def connect(_: str, seen: Seen) -> None:
        asked.append(seen.message)
        joiner.online()

    nodes.catch(DOWN, lambda _, message: a(m.Assignment, step=STEP - 1)(message), connect)
    assert train(config_of(model, folder, "kto"), nodes.port) == 0
    story = told(folder).splitlines()
    assert "c connecting connected" in story
    assert "c ready " in story
    first, (round_of_it,) = joiner.saw(DOWN, m.Assignment)[0], asked
    assert isinstance(round_of_it, m.Assignment)
    assert first.step >= STEP - 1
    assert (first.step, first.verb) != (round_of_it.step, round_of_it.verb)
    (offer,) = [offer for offer in joiner.saw(DOWN, m.VectorOffer) if offer.adapter_version == first.adapter_version]
    assert offer.kind == "adapter"
    assert sha(folder) == expected
