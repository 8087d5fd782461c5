"""The facts on a host that decide which files it needs: system, processor, work folder, space, rsync, interpreters."""

from dataclasses import dataclass

from mlxdist.coordinator.launch.quoting import path_word
from mlxdist.coordinator.launch.ssh import Answer
from mlxdist.macos import HAS_TOOLS, RELEASE

MINORS = ("3.12", "3.13", "3.11", "3.14")  # of Python, the first choice first: mlx has packages for these
PROCESSORS = {"arm64": "aarch64", "aarch64": "aarch64", "x86_64": "x86_64"}
NEWEST_GLIBC = 40  # 2.40: the newest that uv has a name for


@dataclass(frozen=True)
class Platform:
    """A kind of machine, as packages know it. Two hosts of one platform get the same files."""

    system: str  # Darwin or Linux
    processor: str  # aarch64 or x86_64
    release: int  # of macOS: its first number; of Linux: the second number of its glibc, 2.x

    @property
    def uv(self) -> str:
        """The platform's name for uv."""
        if self.system == "Darwin":
            return f"{self.processor}-apple-darwin"
        return f"{self.processor}-manylinux_2_{min(self.release, NEWEST_GLIBC)}"

    @property
    def tags(self) -> list[str]:
        """The platform's names in wheels, for pip, which adds the older ones of macOS itself."""
        if self.system == "Darwin":
            return [f"macosx_{self.release}_0_arm64"]
        newer = [f"manylinux_2_{minor}_{self.processor}" for minor in range(self.release, 16, -1)]
        return [*newer, f"manylinux2014_{self.processor}"]

    @property
    def python(self) -> str:
        """The platform's name for the interpreters that uv manages."""
        return f"macos-{self.processor}-none" if self.system == "Darwin" else f"linux-{self.processor}-gnu"


@dataclass(frozen=True)
class HostFacts:
    """One host, as its own commands describe it."""

    platform: Platform
    workdir: str  # absolute
    free_bytes: int  # on its disk, for this user
    rsync: str  # absolute path; "" without one, or where the login shell's text would garble it
    pythons: tuple[tuple[str, str], ...]  # suitable interpreters: minor version and absolute path, best first


def facts_script(workdir: str) -> str:
    """Returns the script that asks a host for its facts, in one line for /bin/sh. It writes nothing."""
    names = " ".join(f"python{minor}" for minor in (*MINORS, ""))
    check = 'import platform, sys; print("%d.%d" % sys.version_info[:2], platform.machine(), sys.executable)'
    return (
        f'W={path_word(workdir)}; case "$W" in /*) ;; *) W="$HOME/$W";; esac; echo "workdir $W"; '
        'D="$W"; while [ ! -d "$D" ]; do D="$(dirname "$D")"; done; '
        'echo "free $(df -Pk "$D" | awk "NR==2 {print \\$4}")"; '
        f'echo "system $(uname -s)"; echo "machine $(uname -m)"; echo "release $({{ {RELEASE} || '
        'getconf GNU_LIBC_VERSION; } 2>/dev/null)"; '
        'for P in "$(command -v rsync)" /opt/homebrew/bin/rsync /usr/local/bin/rsync /usr/bin/rsync; do '
        '"$P" --version >/dev/null 2>&1 && echo "rsync $P" && break; done; '
        f'S=/usr/bin; [ "$(uname -s)" = Darwin ] && ! {HAS_TOOLS} && S=; '
        f'for N in {names}; do for D in /opt/homebrew/bin /usr/local/bin "$HOME/.local/bin" $S; do '
        f'[ -x "$D/$N" ] && echo "python $("$D/$N" -c \'{check}\' 2>/dev/null)"; done; done; true'
    )


def read_facts(answer: Answer) -> HostFacts | str:
    """Returns the facts in a host's answer to `facts_script`, or the reason for which mlxdist cannot run there."""
    lines = [line.split(" ", 1) for line in answer.out.splitlines() if " " in line]
    said = dict(reversed(lines))  # the first of several holds
    machine, system = said.get("machine", ""), said.get("system", "")
    processor = PROCESSORS.get(machine)
    if system not in ("Darwin", "Linux") or processor is None or (system == "Darwin" and processor != "aarch64"):
        return f"it is {system or 'an unknown system'} on {machine or 'an unknown processor'}, and mlx needs " + (
            "Apple Silicon (or Linux on arm64 or x86_64)"
        )
    release = said.get("release", "").removeprefix("glibc ").split(".")
    number = release[0] if system == "Darwin" else release[1] if len(release) > 1 else ""
    free = said.get("free", "")
    if not number.isdigit() or not free.isdigit() or "workdir" not in said:
        return f"its answer is not understood: {answer.out[:200]!r}"
    found = [words[1].split(" ", 2) for words in lines if words[0] == "python"]
    fit = [(one[0], one[2]) for one in found if len(one) == 3 and one[0] in MINORS and one[1] == machine]
    fit.sort(key=lambda one: MINORS.index(one[0]))
    rsync = said.get("rsync", "") if not answer.talk else ""
    return HostFacts(
        Platform(system, processor, int(number)), said["workdir"], int(free) * 1024, rsync, tuple(dict.fromkeys(fit))
    )
