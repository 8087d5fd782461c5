"""The faults of a host, from what ssh and a command there have answered: a sentence, and the command to type.

Pure functions; fault_patterns.py holds what they look for.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mlxdist.coordinator.launch.fault_patterns import (
    COMMAND_PATTERNS,
    MLXDIST_MISSING,
    SHELL_TALKS,
    SSH_PATTERNS,
    Pattern,
)
from mlxdist.coordinator.launch.ssh import Answer, Target
from mlxdist.protocol.untrusted import quoted
from mlxdist.protocol.versions import CODE

SSH_FAILED = 255  # the exit code of ssh itself
NOT_FOUND, NOT_RUN = 127, 126  # exit codes of sh


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. `transient`: it may go away without a person, so that trying again makes sense."""

    kind: str
    what: str  # a clause about the host, without its name
    cure: str  # what to do, with the command to type
    transient: bool = False

    def __str__(self) -> str:
        return f"{self.what}. {self.cure}"


def ssh_finding(target: Target, answer: Answer) -> Finding | None:
    """Returns why a command was not run on a host, or not to its end; None when ssh did its part."""
    names = _names(target)
    if answer.code is None:
        what = "it did not answer in time" if not answer.reached else "the command there did not end in time"
        return Finding("timeout", what, f"See whether it is busy or asleep, and try {names['ssh']}", transient=True)
    lost = answer.reached and answer.code == SSH_FAILED
    if answer.reached and not lost:
        return None
    printed = answer.err if answer.reached else answer.ssh
    if found := _first(SSH_PATTERNS, printed, names):
        return found
    if lost:
        return None  # the command itself gave this exit code
    if answer.code == SSH_FAILED:
        what = f"ssh failed: {_last_line(printed) or 'without a word'}"
        return Finding("unreachable", what, f"Try {names['ssh']}", transient=True)
    said = _last_line(printed) or _last_line(answer.talk)
    what = f"its login shell ran no command{f', and said: {said}' if said else ''}"
    return Finding("no shell", what, f"Try {names['ssh']} true; the user needs a login shell, as /bin/zsh")


def command_finding(answer: Answer, interpreter: str) -> Finding | None:
    """Returns why a command that was run there failed, as far as its output tells; `interpreter`: the one it starts."""
    printed = f"{answer.err}\n{answer.out}"
    if found := _first(COMMAND_PATTERNS, printed, {}):
        return found
    if answer.code in (NOT_FOUND, NOT_RUN):
        return Finding(
            "interpreter missing",
            f"there is no Python that its user may run at {quoted(interpreter)}",
            "Type mlxdist sync --hosts hosts.toml run.toml (or launch with --sync), or set python for it in hosts.toml",
        )
    return None


def finding(target: Target, answer: Answer, interpreter: str = "python3") -> Finding | None:
    """Returns what is wrong with a host by one answer of it; None when all is well or the reason is not known."""
    if found := ssh_finding(target, answer):
        return found
    return None if answer.code == 0 else command_finding(answer, interpreter)


def talk_finding(answer: Answer) -> Finding | None:
    """Returns a finding for a login shell that prints text; it does not keep a host from training."""
    if not answer.reached or not answer.talk.strip():
        return None
    return _made(SHELL_TALKS, (quoted(answer.talk.strip().splitlines()[0], 60),), {})


def version_finding(here: Mapping[str, str], there: Mapping[str, str]) -> Finding | None:
    """Returns a finding for packages of other versions than the coordinator's, by name and version."""
    labels = {name: "mlxdist with code" if name == CODE else name for name in here if there.get(name) != here[name]}
    other = [f"{label} {quoted(there.get(name) or 'missing', 40)}" for name, label in labels.items()]
    if not other:
        return None
    if not there.get("mlxdist"):
        return _made(MLXDIST_MISSING, (), {})
    wanted = ", ".join(f"{label} {here[name]}" for name, label in labels.items())
    return Finding(
        "other version",
        f"it has {', '.join(other)}, and the coordinator {wanted}",
        "Type mlxdist sync --hosts hosts.toml run.toml, or launch with --sync",
    )


def _names(target: Target) -> Mapping[str, str]:
    ssh = shlex.join(["ssh", *target.options, target.name])
    return MappingProxyType(
        {
            "ssh": ssh,
            "host": target.host,
            "login": shlex.join([*target.options, target.name]),
            "user": target.user or "that ssh takes",
            "forget": f"ssh-keygen -R {shlex.quote(target.host)}",
        }
    )


def _first(patterns: tuple[Pattern, ...], printed: str, names: Mapping[str, str]) -> Finding | None:
    for pattern in patterns:
        if match := re.search(pattern.shows, printed, re.MULTILINE):
            exact = re.search(r"^ *(ssh-keygen -f .+ -R .+)$", printed, re.MULTILINE)
            extra = {"forget": exact[1]} if exact else {}
            return _made(pattern, match.groups(), {**names, **extra})
    return None


def _made(pattern: Pattern, groups: tuple[str | None, ...], names: Mapping[str, str]) -> Finding:
    shown = [quoted(group or "") for group in groups]
    what, cure = (text.format(*shown, *[""] * 3, **names).strip() for text in (pattern.what, pattern.cure))
    return Finding(pattern.kind, what, cure, pattern.transient)


def _last_line(printed: str) -> str:
    lines = [line for line in printed.splitlines() if line.strip()]
    return quoted(lines[-1]) if lines else ""
