"""Looks at a run on another host, through one ssh connection: a script there prints what is new, and writes nothing.

A look is a line of facts (the time there; the time of the lock, the host in it, and this host's name; the age of its
process; the event file's inode; the offset of what follows, and what is left after it), then the new bytes of the event
file in base64, then a full stop:

    look 1764598391 1764598100 mini-1 mini-1 04:51 812345 10240 0
    eyJldmVudCI6ICJ0cmFpbiIsIC…
    .
"""

import base64
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from mlxdist.coordinator.launch.findings import finding
from mlxdist.coordinator.launch.quoting import path_word
from mlxdist.coordinator.launch.ssh import Answer, Target, argv, new_marker
from mlxdist.coordinator.overview.find import CLOCK_SECONDS
from mlxdist.coordinator.report.event_log import event_of
from mlxdist.coordinator.report.history import is_whole
from mlxdist.coordinator.status.looks import Look
from mlxdist.protocol.errors import NodeError, UserError

MOST_BYTES = 2**21  # of one line of facts, before base64
NO_RUN = 3  # the script's exit code where there is no run in the folder
FACTS = re.compile(r"look (\d+) (\d+) (\S+) (\S+) (\S+) (\d+) (\d+) (\d+)\s*")
AGE = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)")  # of a process, as ps prints it: [[days-]hours:]minutes:seconds


@dataclass(frozen=True)
class Facts:
    """The line of facts."""

    now: float  # seconds since 1970, there
    held: bool | None  # a coordinator writes in the run
    begun: float  # when it began to, there
    inode: int  # of the event file
    offset: int  # of the bytes that follow
    left: int  # bytes of the file after them


def look_script(folder: str, owner: str, *, repeat: bool) -> str:
    """Returns the script that prints looks at the run in `folder`, one line for /bin/sh; `repeat`: about one a second.

    `owner`: a file with the process that is to write in it, of a run that may not have a folder yet; "": its lock. The
    loop ends with the connection.
    """
    exists = f'[ -f "$D/manifest.json" ] || {{ echo "there is no run in $D" >&2; exit {NO_RUN}; }}; '
    lock = f"L={path_word(owner)}; " if owner else f'L="$D/state/lock"; {exists}'
    return (
        f'D={path_word(folder)}; M="$D/metrics.jsonl"; O=0; I=0; {lock}'
        'while :; do P=0; H=; E=; T=0; J=0; S=0; [ -f "$L" ] && { read -r P H < "$L"; '
        'T=$(stat -c %Y "$L" 2>/dev/null || stat -f %m "$L" 2>/dev/null || echo 0); }; '
        '[ "$P" -gt 1 ] 2>/dev/null && E=$(ps -o etime= -p "$P"); set -- $E; E=$1; '
        '[ -f "$M" ] && { set -- $(ls -i "$M"); J=$1; S=$(($(wc -c < "$M"))); }; '
        '[ "$J" = "$I" ] && [ "$S" -ge "$O" ] || { I=$J; O=0; }; '
        f'C=$((S-O)); [ "$C" -gt {MOST_BYTES} ] && C={MOST_BYTES}; '
        'echo "look $(date +%s) ${T:-0} ${H:--} $(uname -n) ${E:--} ${J:-0} $O $((S-O-C))"; '
        '[ "$C" -gt 0 ] && tail -c +$((O+1)) "$M" | head -c "$C" | base64; echo .; O=$((O+C)); '
        f'[ "$S" -gt "$O" ] || {"sleep 1" if repeat else "exit 0"}; done'
    )


def facts_in(line: str) -> Facts | None:
    """Returns the facts of their line; None for any other line."""
    if (found := FACTS.fullmatch(line)) is None:
        return None
    now, lock, host, here, age, inode, offset, left = found.groups()
    held: bool | None = False
    if host not in ("-", here):
        held = None
    elif (parts := AGE.fullmatch(age)) is not None:
        days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
        began = int(now) - (((days * 24 + hours) * 60 + minutes) * 60 + seconds)
        held = began <= int(lock) + CLOCK_SECONDS  # else the process has the number of one that has ended
    return Facts(float(now), held, float(lock), int(inode), int(offset), int(left))


@dataclass
class Place:
    """A place in an event file that grows, and is replaced by --resume: then its reading begins again."""

    inode: int = 0
    offset: int = 0
    rest: bytes = b""  # of a line that is not whole

    def begins_again(self, inode: int, size: int) -> bool:
        """Returns true where the file is another one than before, or shorter: all of it is to be read then."""
        if inode == self.inode and size >= self.offset:
            return False
        self.inode, self.offset, self.rest = inode, 0, b""
        return True

    def take(self, data: bytes) -> Iterator[Mapping[str, Any]]:
        """Yields the events in the next bytes of the file."""
        self.offset += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            if (event := event_of(line)) is not None and is_whole(event):
                yield event


@dataclass
class RemoteRun:
    """A run in a folder of another host, while the block lasts. `owner`: see `look_script`."""

    target: Target
    folder: str
    owner: str = ""
    repeat: bool = True
    _place: Place = field(default_factory=Place)
    _open: ExitStack = field(default_factory=ExitStack)
    _next: Facts | None = None  # a line that was read, and belongs to the next look

    @property
    def name(self) -> str:
        """The run as it is shown."""
        return f"{self.target.host}:{self.folder.rstrip('/').rpartition('/')[2]}"

    def __enter__(self) -> "RemoteRun":
        self._marker = new_marker()
        script = look_script(self.folder, self.owner, repeat=self.repeat)
        self._process = subprocess.Popen(
            argv(self.target, script, self._marker),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is for us
        )
        self._open.enter_context(self._process)
        self._open.callback(self._process.terminate)
        self._reached = False
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.close()

    def look(self) -> Look:
        """Returns the next look. Raises NodeError for a host that is not reached or was lost, UserError for no run."""
        facts, self._next = self._next or self._facts(), None
        whole = self._place.begins_again(facts.inode, facts.offset)
        return Look(self._events(facts), whole, facts.held, facts.begun, facts.now)

    def _events(self, facts: Facts) -> Iterator[Mapping[str, Any]]:
        while True:
            yield from self._place.take(base64.b64decode("".join(iter(self._line, "."))))
            if not facts.left:
                return
            facts = self._facts()
            if (facts.inode, facts.offset) != (self._place.inode, self._place.offset):
                self._next = facts  # the file was replaced while it was read
                return

    def _facts(self) -> Facts:
        while (facts := facts_in(self._line())) is None:
            continue
        return facts

    def _line(self) -> str:
        """Returns the next line that the script has printed. Raises NodeError and UserError at its end."""
        assert self._process.stdout is not None
        while data := self._process.stdout.readline():
            line = data.decode(errors="replace").rstrip("\r\n")
            if self._reached:
                return line
            self._reached = line == self._marker
        raise self._ended()

    def _ended(self) -> Exception:
        assert self._process.stderr is not None
        talk, _, said = self._process.stderr.read().decode(errors="replace").partition(f"\n{self._marker}\n")
        code = self._process.wait()
        if code == NO_RUN and self._reached:
            return UserError(f"{self.target.host}: {said.strip()}")
        fault = finding(self.target, Answer(code, "", said, self._reached, "", talk), "")
        return NodeError(f"{self.target.host}: {fault or said.strip() or 'the connection was lost'}")
