"""Real nodes for the fault tests, each behind its own proxy. They serve many runs and are restored in between."""

import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from mlxdist.protocol import messages as m
from mlxdist.protocol.messages import Message
from mlxdist.protocol.transport import CONTROL
from scripts.local_cluster import free_ports
from tests.faults.fault_proxy import DOWN, PATIENCE_SECONDS, UP, Proxy, Seen, Test, wait_for
from tests.processes.node_pools import start_node

MOST_KILLS = 5  # of workers per supervisor, which counts them; the next test then gets a new supervisor


@dataclass
class FaultNodes:
    """Nodes by name. A run takes part with those that are online."""

    logs: Path
    port: int
    proxies: dict[str, Proxy] = field(default_factory=dict)
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    kills: Counter[str] = field(default_factory=Counter)

    # ---- before a test

    def ready(self, *names: str, later: tuple[str, ...] = ()) -> None:
        """Restores these nodes, whatever was done to them, and lets them begin together.

        The nodes in `later` run too, but stay offline until the test lets them join. All others stay offline.
        """
        for name in (*names, *later):
            if name not in self.proxies:
                self.proxies[name] = Proxy(self.port).start()
            self.proxies[name].forget()
            self.go_on(name)
            if self.kills[name] >= MOST_KILLS:
                self._end(name)
            if name not in self.processes or self.processes[name].poll() is not None:
                self.start(name)
        for name, proxy in self.proxies.items():
            if name not in names:
                proxy.forget()
                proxy.offline()
        barrier = threading.Barrier(len(names))  # so that each has work from the second step on at the latest
        for name in names:
            self.proxies[name].when(UP, a(m.CanaryAnswer), lambda _: none(barrier.wait(PATIENCE_SECONDS)))

    def start(self, name: str) -> None:
        """Starts a supervisor of this name, also after the one before was killed."""
        self.kills[name] = 0
        self.processes[name] = start_node(self.proxies[name].ports[CONTROL], name, self.logs)

    def online(self) -> list[str]:
        """The names of the nodes that can take part."""
        return [name for name, proxy in self.proxies.items() if proxy.is_online]

    # ---- actions at a message

    def catch(
        self, direction: str, test: Callable[[str, Message], bool], action: Callable[[str, Seen], None]
    ) -> "Caught":
        """Acts at the first message of any node that passes `test(name, message)`; the result names the node.

        So a test need not know which node gets which work, only that some node does.
        """
        caught = Caught()
        for name in self.online():

            def act(seen: Seen, name: str = name) -> None:
                if caught.take(name):
                    action(name, seen)
                    caught.done.set()

            self.proxies[name].when(direction, lambda message, name=name: test(name, message), act)
        return caught

    def catch_adapter(self, version: int, action: Callable[[str, Seen], None]) -> "Caught":
        """Acts at the first block of this adapter version on its way to a node that already has an assignment for it.

        All credits for it wait until the coordinator has sent the first such assignment.
        """
        given = threading.Event()

        def of_it(name: str, message: Message) -> bool:
            offer = self.offer(name, DOWN, message) if isinstance(message, m.Credit | m.VectorBlock) else None
            return offer is not None and (offer.kind, offer.adapter_version) == ("adapter", version)

        tasked = self.catch(
            DOWN, lambda _, message: a(m.Assignment, adapter_version=version)(message), lambda *_: given.set()
        )
        for name in self.online():
            self.proxies[name].when(
                UP, lambda message, name=name: of_it(name, message), lambda _: wait_for(given, "a task")
            )
        return self.catch(DOWN, lambda name, message: name == tasked.name and of_it(name, message), action)

    def catch_answer(self, verb: str, step: int, action: Callable[[str, Seen], None], left: int = 1) -> "Caught":
        """Acts at an answer, from this step on, to a task that no other node has too, with `left` leaves to come.

        A node that was left out of the last steps gets a copy of another's task now and then, to be measured again;
        the loss of either gives nothing to others. Scores are never copied for that.
        """

        def test(name: str, message: Message) -> bool:
            if not isinstance(message, m.LeafAnswer) or message.step < step:
                return False
            task = self.task(name, message)
            return task.verb == verb and message.leaf + left < task.stop and not self.copied(name, task)

        return self.catch(UP, test, action)

    def leave_the_rest_to(self, who: Callable[[], str], step: int) -> threading.Event:
        """Holds the first assignment of another node from this step on until the event; then only `who()` is online."""
        back = threading.Event()

        def only(_: str, seen: Seen) -> None:
            wait_for(back, f"{who()} to take part again")
            for name in self.online():
                if name != who():
                    self.proxies[name].offline()

        self.catch(
            DOWN,
            lambda name, message: name != who() and isinstance(message, m.Assignment) and message.step >= step,
            only,
        )
        return back

    def task(self, name: str, answer: m.LeafAnswer | m.VectorOffer) -> m.Assignment:
        """The assignment that an answer belongs to."""
        tasks = self.proxies[name].saw(DOWN, m.Assignment)
        return next(task for task in tasks if (task.session, task.attempt) == (answer.session, answer.attempt))

    def copied(self, name: str, task: m.Assignment) -> bool:
        """True if another node was given some of the leaves of this task too."""
        others = [one for other in self.proxies if other != name for one in self.proxies[other].saw(DOWN, m.Assignment)]
        same = [one for one in others if (one.step, one.verb) == (task.step, task.verb)]
        return any(one.start < task.stop and task.start < one.stop for one in same)

    def offer(self, name: str, direction: str, message: m.VectorBlock | m.VectorEnd | m.Credit) -> m.VectorOffer | None:
        """The offer of the vector that travels in this direction under the number of the message, if there is one."""
        offers = self.proxies[name].saw(direction, m.VectorOffer)
        return next((o for o in offers if (o.session, o.stream) == (message.session, message.stream)), None)

    # ---- what a test does to a node

    def supervisor(self, name: str) -> psutil.Process:
        """The supervisor of a node."""
        return psutil.Process(self.processes[name].pid)

    def worker(self, name: str) -> psutil.Process:
        """The worker of a node."""
        for child in self.supervisor(name).children():
            with suppress(psutil.Error):
                if "mlxdist.node.worker" in child.cmdline():
                    return child
        raise AssertionError(f"{name} has no worker")

    def processes_of(self, name: str, which: str) -> list[psutil.Process]:
        """The processes of a node; `which` is worker, supervisor or both."""
        supervisor = self.supervisor(name)
        if which == "both":
            return [supervisor, *supervisor.children()]
        return [supervisor] if which == "supervisor" else [self.worker(name)]

    def kill(self, name: str, which: str = "worker") -> None:
        """Sends SIGKILL and waits for the end."""
        victims = self.processes_of(name, which)
        for process in victims:
            process.kill()
        if which == "worker":
            self.kills[name] += 1
        else:
            self.processes[name].wait()

    def stop(self, name: str, which: str = "both") -> None:
        """Sends SIGSTOP."""
        for process in self.processes_of(name, which):
            process.suspend()

    def go_on(self, name: str) -> None:
        """Sends SIGCONT to all processes of a node."""
        with suppress(psutil.Error, KeyError):
            supervisor = self.supervisor(name)
            for process in [*supervisor.children(recursive=True), supervisor]:
                with suppress(psutil.Error):
                    process.resume()

    # ---- at the end

    def check(self) -> None:
        """Asserts that no action of a proxy failed."""
        errors = {name: proxy.errors for name, proxy in self.proxies.items() if proxy.errors}
        assert not errors, errors

    def close(self) -> None:
        """Ends all nodes and proxies."""
        for name in self.processes:
            self._end(name)
        for proxy in self.proxies.values():
            proxy.close()

    def _end(self, name: str) -> None:
        with suppress(psutil.Error):
            for one in [*self.supervisor(name).children(recursive=True), self.supervisor(name)]:
                with suppress(psutil.Error):
                    one.send_signal(signal.SIGKILL)
        self.processes[name].wait()


@dataclass
class Caught:
    """The node that a trap caught."""

    name: str = ""
    done: threading.Event = field(default_factory=threading.Event)  # the action is over
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, name: str) -> bool:
        """Notes the node if it is the first one; returns true then."""
        with self._lock:
            first = not self.name
            self.name = self.name or name
            return first


@contextmanager
def fault_nodes(logs: Path) -> Iterator[FaultNodes]:
    """Nodes at their own port, which end with the block."""
    nodes = FaultNodes(logs, free_ports())
    try:
        yield nodes
    finally:
        nodes.close()


def a(kind: type[Message], **fields: object) -> Test:
    """Makes a test for the rule of a proxy: a message of this type whose fields have these values."""
    return lambda message: (
        isinstance(message, kind) and all(getattr(message, name) == value for name, value in fields.items())
    )


def none(_: object) -> None:
    """Drops the result of a call."""
