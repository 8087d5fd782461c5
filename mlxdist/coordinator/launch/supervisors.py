"""Starts and ends the nodes of a run: one supervisor each, on this machine or over ssh, in a process group of its own.

A supervisor leaves when its standard input ends, so that it cannot outlive us or the connection to its host. One that
was killed, or whose host was lost, is started again when the host answers.
"""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from mlxdist.coordinator.config.hosts import NodeSpec
from mlxdist.coordinator.fleet.ended import Ended, Printed
from mlxdist.coordinator.launch.findings import Finding, finding
from mlxdist.coordinator.launch.output import Output
from mlxdist.coordinator.launch.scripts import Group, end_script, group_of, start_script
from mlxdist.coordinator.launch.ssh import argv, everywhere, new_marker, run, target_of
from mlxdist.coordinator.launch.workdir import interpreter_of, workdir_of
from mlxdist.macos import keep_awake
from mlxdist.protocol.backoff import MOST_FACTOR, Backoff
from mlxdist.protocol.errors import NodeError
from mlxdist.protocol.launched import AWAY, LaunchOrder, order_line

TERM_SECONDS = 2.0  # from SIGTERM to SIGKILL, on this machine
END_SECONDS = 20.0  # for ssh to reach a host on which a group is to be ended
LAST_LINES_SECONDS = 5.0  # for the last lines of a process that has ended, where another one holds its streams
SSH_FAILED = 255


@dataclass(frozen=True)
class Start:
    """All that one node is started with. `keys`: its first line; `order`: the coordinator as it reaches it."""

    node: NodeSpec
    keys: bytes
    order: LaunchOrder
    forwards: tuple[tuple[str, int], ...] = ()  # transport = "ssh": control and data here, for ssh -R


@dataclass
class Supervised:
    """A node that was started: its process here, which is ssh for one on another host."""

    start: Start
    backoff: Backoff
    tag: str = ""
    process: "subprocess.Popen[bytes] | None" = None
    output: Output = field(default_factory=Output)
    ordered: bool = False  # its lines were written
    ended_at: float | None = None  # when its process was seen to have ended
    due: float | None = None  # when it is started again
    ran: bool = False  # it was started on its host once
    before: Group | None = None  # what an earlier start may have left on its host

    @property
    def remote(self) -> bool:
        """True if it is on another host."""
        return not target_of(self.start.node).local


@dataclass
class Supervisors:
    """The supervisors that this coordinator has started, and starts again."""

    run: str  # the run's name, which a process list shows
    stop_seconds: float
    restart_seconds: float
    clock: Callable[[], float] = time.monotonic
    _all: dict[str, Supervised] = field(default_factory=dict)

    @property
    def processes(self) -> Mapping[str, "subprocess.Popen[bytes]"]:
        """The processes by node: a supervisor, or the ssh that carries one."""
        return {name: one.process for name, one in self._all.items() if one.process is not None}

    def start(self, starts: Sequence[Start], later: Sequence[Start] = ()) -> None:
        """Starts a supervisor for each node; those in `later` are tried after a while: their hosts did not answer."""
        for start in (*starts, *later):
            one = self._all[start.node.name] = Supervised(start, Backoff(self.restart_seconds))
            if start in later:
                one.due = self.clock() + self._pause(one, self.clock())
            else:
                self._start(one)

    def _start(self, one: Supervised) -> None:
        one.due, one.ended_at, one.ordered = None, None, False
        if one.output.header:
            one.before = group_of(one.output.header, one.tag) or one.before
        one.tag = f"{self.run}.{secrets.token_hex(6)}"
        marker = new_marker() if one.remote else ""
        one.output = Output(marker)
        one.process = process = subprocess.Popen(
            self._remote(one, marker) if one.remote else self._local(one),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is for the coordinator alone
        )
        assert process.stdout is not None
        assert process.stderr is not None
        one.output.read(process.stdout, process.stderr)
        self._order(one)

    def _local(self, one: Supervised) -> list[str]:
        node = one.start.node
        command = [node.python or sys.executable, "-m", "mlxdist", "node", "--launched", "--name", node.name]
        return [*(keep_awake() if node.caffeinate else []), *command, "--tag", one.tag]

    def _remote(self, one: Supervised, marker: str) -> list[str]:
        node, before = one.start.node, end_script(one.before, self.stop_seconds) if one.before is not None else ""
        script = start_script(
            node.name, one.tag, interpreter_of(node), workdir_of(node), caffeinate=node.caffeinate, before=before
        )
        # Our own connection, which ends with this process, even where the user shares connections.
        options = ["-o", "ControlPath=none", "-o", "ControlMaster=no"]
        if one.start.forwards:
            options += ["-o", "ExitOnForwardFailure=yes"]
            for host, port in one.start.forwards:
                options += ["-R", f"127.0.0.1:0:{f'[{host}]' if ':' in host else host}:{port}"]
        else:
            options += ["-o", "ClearAllForwardings=yes"]
        return argv(target_of(node), script, marker, *options)

    def _order(self, one: Supervised) -> None:
        """Writes the lines of a node to its standard input, once its ports are known."""
        order = one.start.order
        if one.start.forwards:
            ports = [one.output.ports.get(port) for _, port in one.start.forwards]
            if None in ports:
                return
            order = msgspec.structs.replace(order, host="127.0.0.1", port=ports[0], data_port=ports[1])
        assert one.process is not None
        assert one.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, and `watch` says why
            one.process.stdin.write(one.start.keys + order_line(order))
            one.process.stdin.flush()
        one.ordered = True

    def watch(self) -> list[Ended | Printed]:
        """Returns what the supervisors have printed and which have ended since the last call; starts those due.

        One that left of itself (refused, or with too many workers that ended) has said why, and stays away.
        """
        now = self.clock()
        events: list[Ended | Printed] = []
        for name, one in self._all.items():
            code = self._exit_code(one, now)
            events += [Printed(name, line) for line in one.output.take()]
            if code is not None:
                events.append(self._ended(one, code, now))
            elif one.process is not None and not one.ordered:
                self._order(one)
            if one.due is not None and now >= one.due:
                self._start(one)
        return events

    def _exit_code(self, one: Supervised, now: float) -> int | None:
        """Returns the exit code of a process that has ended, once all that it printed is read; None before."""
        code = one.process.poll() if one.process is not None else None
        if code is None:
            return None
        one.ended_at = one.ended_at if one.ended_at is not None else now
        return code if one.output.whole or now - one.ended_at > LAST_LINES_SECONDS else None

    def _ended(self, one: Supervised, code: int, now: float) -> Ended:
        """Notes that a process has ended. One that may work again is started again after a while."""
        name = one.start.node.name
        assert one.process is not None
        _close(one.process)
        signal_group(one.process.pid, signal.SIGKILL)
        one.process = None
        one.ran = one.ran or bool(one.output.header)
        fault = None
        if one.remote:
            fault = finding(target_of(one.start.node), one.output.answer(code), interpreter_of(one.start.node))
        wait = None
        if one.remote and (again(code, fault) or (one.ran and not one.output.header)):
            wait = self._pause(one, now)
        elif not one.remote and code < 0:
            wait = one.backoff.next(now)
        if wait is not None:
            one.due = now + wait
        return Ended(name, self._error(one, code, fault), wait is None)

    def _pause(self, one: Supervised, now: float) -> float:
        """Returns the seconds until a host is tried again: ever more of them, and there is no last time."""
        return one.backoff.next(now) or self.restart_seconds * MOST_FACTOR

    def _error(self, one: Supervised, code: int, fault: Finding | None) -> NodeError:
        name = one.start.node.name
        if fault is not None:
            return NodeError(f"{name}: {fault}")
        what = "its supervisor, or ssh," if one.remote else "its supervisor"
        lines = "".join(f"\n  | {line}" for line in one.output.tail)
        last = f"; the last lines that it printed:{lines}" if lines else ""
        return NodeError(f"{name}: {what} ended with exit code {code}{last}")

    def stop(self) -> list[Printed]:
        """Ends all supervisors, and returns the last lines that they printed.

        Waits `stop_seconds` for every process to end after the goodbye; then SIGTERM, and in the end SIGKILL.

        On another host the recorded process group is ended, over a new connection.
        """
        running = [one for one in self._all.values() if one.process is not None]
        for one in self._all.values():
            one.due = None
        for one in running:
            assert one.process is not None
            _close(one.process)
        until = time.monotonic() + self.stop_seconds
        left = [one for one in running if one.process is not None and not ends(one.process, until)]
        if left:
            everywhere(self._end, left)
        for one in running:
            assert one.process is not None
            one.process.wait()
            signal_group(one.process.pid, signal.SIGKILL)  # whatever of the group outlived its leader
            one.output.finish()
            one.process = None
        return [Printed(name, line) for name, one in self._all.items() for line in one.output.take()]

    def _end(self, one: Supervised) -> None:
        process = one.process
        assert process is not None
        group = group_of(one.output.header, one.tag)
        if one.remote and group is not None:
            run(
                target_of(one.start.node), end_script(group, self.stop_seconds), timeout=self.stop_seconds + END_SECONDS
            )
        signal_group(process.pid, signal.SIGTERM)
        if not ends(process, time.monotonic() + TERM_SECONDS):
            signal_group(process.pid, signal.SIGKILL)


def again(code: int, fault: Finding | None) -> bool:
    """Returns True when a node on a host that has ended so may work again.

    Its ssh was killed or lost the host, it heard nothing of us, or its input ended; or the fault may pass.
    """
    return fault.transient if fault is not None else code < 0 or code in (SSH_FAILED, AWAY, 0)


def _close(process: "subprocess.Popen[bytes]") -> None:
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()


def ends(process: "subprocess.Popen[bytes]", until: float) -> bool:
    """True if the process ends before the monotonic time `until`."""
    try:
        process.wait(max(until - time.monotonic(), 0.01))
    except subprocess.TimeoutExpired:
        return False
    return True


def signal_group(group: int, number: signal.Signals) -> None:
    """Signals a process group of ours that may be gone."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)
