"""The scripts that start a node on a host and end it, each one line for /bin/sh."""

from dataclasses import dataclass

from mlxdist.coordinator.launch.quoting import path_word, quote, words


@dataclass(frozen=True)
class Group:
    """The process group of a node on its host: its leader, and the tag that the leader's command line shows."""

    leader: int
    tag: str


def start_script(name: str, tag: str, interpreter: str, workdir: str, *, caffeinate: bool, before: str = "") -> str:
    """Returns the script that becomes a supervisor, which leads its own process group: sshd has made a session for it.

    It prints one line first: the process id, and the address at which the host sees this machine. `before`: a script
    to run first, which ends what an earlier start has left.
    """
    awake = "[ -x /usr/bin/caffeinate ] && set -- /usr/bin/caffeinate -is; " if caffeinate else ""
    return (
        f'{before}W={path_word(workdir)}; mkdir -p "$W" && cd "$W" || exit 1; P={path_word(interpreter)}; '
        f'[ -x "$P" ] || {{ echo "$P: not found" >&2; exit 127; }}; '
        f'echo "$$ ${{SSH_CONNECTION%% *}}"; set --; {awake}'
        f'exec "$@" "$P" -u -m mlxdist node --launched {words("--name", name, "--tag", tag)}'
    )


def end_script(group: Group, seconds: float) -> str:
    """Returns the script that ends a process group, and only that one: SIGTERM, and SIGKILL `seconds` later.

    A process of that number with another command line is another's: then nothing of the group is left.
    """
    there = f"kill -s 0 -- -{group.leader} 2>/dev/null"
    return (
        f'case "$(ps -ww -o args= -p {group.leader})" in ""|*{quote(group.tag)}*) '
        f"kill -s TERM -- -{group.leader} 2>/dev/null; N=0; "
        f"while {there} && [ $N -lt {round(10 * seconds)} ]; do sleep 0.1; N=$((N+1)); done; "
        f"{there} && kill -s KILL -- -{group.leader};; esac; "
    )


def group_of(header: str, tag: str) -> Group | None:
    """Returns the process group that a start has reported in its first line."""
    leader = header.partition(" ")[0]
    return Group(int(leader), tag) if leader.isdigit() and int(leader) > 1 else None
