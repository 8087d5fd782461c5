"""Commands on a host: by the system's OpenSSH with the user's own configuration, or by /bin/sh when it is this machine.

No terminal, no password, no library. A login shell may print what it likes: an answer begins after a random marker.
"""

import os
import queue
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import IO, TypeVar, cast

import psutil

from mlxdist.coordinator.config.hosts import NodeSpec, is_local
from mlxdist.coordinator.launch.quoting import remote_command
from mlxdist.protocol.errors import UserError

T = TypeVar("T")
R = TypeVar("R")

CONNECT_SECONDS = 10
ALIVE_SECONDS = 15  # between questions whether the host is there; three without an answer end the connection
RUN_SECONDS = 60.0
AT_ONCE = 16  # hosts
END_SECONDS, LOOK_SECONDS = 5.0, 0.02  # for commands that an interrupt ends
# LogLevel: findings.py reads what ssh prints, so that it must print it. RemoteCommand, SessionType and StdinNull:
# these may be set for the host in the user's configuration, for terminals.
OPTIONS = (
    "BatchMode=yes",
    f"ConnectTimeout={CONNECT_SECONDS}",
    f"ServerAliveInterval={ALIVE_SECONDS}",
    "ServerAliveCountMax=3",
    "LogLevel=INFO",
    "RemoteCommand=none",
    "RequestTTY=no",
    "SessionType=default",
    "StdinNull=no",
    "ForkAfterAuthentication=no",
    "PermitLocalCommand=no",
    "ForwardX11=no",
    "ForwardAgent=no",
)


@dataclass(frozen=True)
class Target:
    """A host as ssh takes it."""

    host: str
    user: str = ""  # "": as the user's ssh configuration says
    options: tuple[str, ...] = ()  # further words for ssh, before ours: -F FILE, -J HOST, -p PORT

    @property
    def local(self) -> bool:
        """True if the host is this machine: no ssh is needed."""
        return is_local(self.host)

    @property
    def name(self) -> str:
        """The host as ssh takes it, with the user if one is given."""
        return f"{self.user}@{self.host}" if self.user else self.host


@dataclass(frozen=True)
class Answer:
    """The outcome of one command on a host."""

    code: int | None  # the command's; ssh's own, 255, when `reached` is False; None: out of time
    out: str  # what the command printed
    err: str
    reached: bool  # the command was started
    talk: str = ""  # what the login shell printed before it
    ssh: str = ""  # what ssh itself, the host's banner and the login shell printed on standard error

    @property
    def ok(self) -> bool:
        """True if the command ran and gave exit code 0."""
        return self.reached and self.code == 0


def target_of(node: NodeSpec) -> Target:
    """Returns where ssh goes for a node."""
    return Target(node.host, node.user, node.ssh_options)


def ssh_words(target: Target, *more: str) -> list[str]:
    """Returns ssh and its options for a host, without the host: what `rsync -e` takes, too. `more`: further options.

    Raises UserError where there is no ssh.
    """
    ssh = shutil.which("ssh")
    if ssh is None:
        raise UserError("there is no ssh on this machine: install OpenSSH (apt install openssh-client)")
    return [ssh, *target.options, "-T", *(word for option in OPTIONS for word in ("-o", option)), *more]


def argv(target: Target, script: str, marker: str, *more: str) -> list[str]:
    """Returns the command that runs `script`, one line for /bin/sh, on the host; its answer begins after `marker`."""
    command = remote_command(script, marker)
    if target.local:
        return ["/bin/sh", "-c", command]
    return [*ssh_words(target, *more), "--", target.name, command]


def new_marker() -> str:
    """Returns a line that nothing else prints."""
    return f"mlxdist-{secrets.token_hex(12)}"


def run(
    target: Target,
    script: str,
    *,
    stdin: bytes | IO[bytes] = b"",
    timeout: float = RUN_SECONDS,
    options: Sequence[str] = (),
) -> Answer:
    """Runs `script`, one line for /bin/sh, on a host, and returns its answer.

    `stdin` is passed through: bytes, or an open file. After `timeout` seconds the connection is ended. `options`:
    further ones for ssh.
    """
    marker = new_marker()
    given = stdin if isinstance(stdin, bytes) else None
    process = subprocess.Popen(
        argv(target, script, marker, *options),
        stdin=subprocess.PIPE if isinstance(stdin, bytes) else stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C in the terminal is for us, and a jump host's ssh ends with this one
    )
    code: int | None
    try:
        out, err = process.communicate(given, timeout)
        code = process.returncode
    except subprocess.TimeoutExpired:
        _kill(process)
        out, err = process.communicate()
        code = None
    except BaseException:
        _kill(process)
        process.communicate()
        raise
    return answer_of(code, out, err, marker)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def answer_of(code: int | None, out: bytes, err: bytes, marker: str) -> Answer:
    """Returns the answer in both streams of a command that began with `marker`."""
    talk, reached, printed = _after(out, marker)
    ssh, _, error = _after(err, marker)
    return Answer(code, printed, error, reached, talk.strip("\n"), ssh.strip("\n"))


def _after(stream: bytes, marker: str) -> tuple[str, bool, str]:
    text = stream.decode(errors="replace").replace("\r\n", "\n")  # ssh's own lines end so
    before, found, after = text.partition(f"\n{marker}\n")
    return before, bool(found), after


def end_children() -> None:
    """Ends every process that this one has started: a command that is interrupted leaves none on any host."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()


def everywhere(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Calls `work` for all items at the same time, as ssh is mostly waiting. Returns the results in their order.

    Raises what `work` raises, once all are done. An interrupt ends all commands at once. Queues and threads here have
    no lock that is written in Python: an interrupt within one would leave it held, and the threads waiting for it.
    """
    items = list(items)
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    told: queue.SimpleQueue[tuple[int, R | None, BaseException | None]] = queue.SimpleQueue()

    def serve() -> None:
        with suppress(queue.Empty):
            while True:
                place = waiting.get_nowait()
                try:
                    told.put((place, work(items[place]), None))
                except BaseException as error:  # raised again by the thread that asked
                    told.put((place, None, error))

    for place in range(len(items)):
        waiting.put(place)
    threads = [threading.Thread(target=serve, name="host", daemon=True) for _ in items[:AT_ONCE]]
    try:
        for thread in threads:
            thread.start()
        answers = sorted((told.get() for _ in items), key=itemgetter(0))
    except KeyboardInterrupt:
        with suppress(queue.Empty):
            while True:
                waiting.get_nowait()
        until = time.monotonic() + END_SECONDS
        while any(thread.is_alive() for thread in threads) and time.monotonic() < until:
            end_children()  # also those that a thread was about to start
            time.sleep(LOOK_SECONDS)
        raise
    for _, _, error in answers:
        if error is not None:
            raise error
    return [cast(R, result) for _, result, _ in answers]
