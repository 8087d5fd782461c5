"""Environments on a host: made by its own uv from files that are there, without the internet; old ones removed."""

from mlxdist.coordinator.launch.quoting import path_word, quote, words
from mlxdist.coordinator.launch.ssh import Target, run
from mlxdist.coordinator.sync.downloads import Kit
from mlxdist.coordinator.sync.files import checked

INSTALL_SECONDS = 900.0
DONE = "lock.txt"  # in an environment that is complete


def is_made(target: Target, workdir: str, name: str) -> bool:
    """Returns True when the host has the environment, complete, and uses it. Raises NodeError."""
    env = f"env/{name}"
    script = (
        f"cd {path_word(workdir)} 2>/dev/null && [ -f {quote(f'{env}/{DONE}')} ] && "
        f'[ "$(readlink env/current)" = {quote(name)} ] && echo yes; true'
    )
    return checked(target, run(target, script), "its environment cannot be looked at").out.strip() == "yes"


def make(target: Target, workdir: str, kit: Kit, interpreter: str) -> None:
    """Makes the environment of a kit whose files are on the host, and lets env/current lead to it.

    `interpreter`: an absolute path there; "" is the one of the kit. Raises NodeError.
    """
    env, uv = f"env/{kit.name}", quote(kit.uv.name)
    steps = [f"cd {path_word(workdir)}", f"chmod +x {uv}", "mkdir -p env", f"rm -rf {quote(env)}"]
    steps.append('export UV_CACHE_DIR="$PWD/cache" UV_NO_CONFIG=1 UV_PYTHON_DOWNLOADS=never UV_OFFLINE=1')
    python = interpreter
    if not python and kit.python is not None:
        folder = kit.python.name.removesuffix(".tar.gz")
        python = f"{folder}/bin/python3"
        steps.append(f"{{ [ -x {quote(python)} ] || tar -xzf {quote(kit.python.name)} -C python; }}")
    steps.append(f"cat > {quote(f'{env}.txt')}")
    steps.append(f"{uv} venv --quiet --python {quote(python)} {quote(env)}")
    steps.append(
        f"{uv} pip install --quiet --python {quote(f'{env}/bin/python')} --no-index --find-links wheels "
        f"--require-hashes --requirement {quote(f'{env}.txt')}"
    )
    steps.append(f"{quote(f'{env}/bin/python')} -m mlxdist --version")
    steps.append(f"mv {words(f'{env}.txt', f'{env}/{DONE}')}")
    steps.append(f"ln -sfn {quote(kit.name)} env/current")
    steps.append("rm -rf cache")
    answer = run(target, " && ".join(steps), stdin=kit.lock.encode(), timeout=INSTALL_SECONDS)
    checked(target, answer, f"the environment {kit.name} cannot be made")


def clean(target: Target, workdir: str, kit: Kit) -> list[str]:
    """Removes what the newest environment does not need, and returns its names. Raises NodeError.

    An environment with running processes stays.
    """
    keep = "".join(f"{name}\n" for name in (kit.name, "current", *(file.path.name for file in kit.files)))
    script = (
        f'cd {path_word(workdir)} || exit 3; K="$(cat)"; for F in env/* uv/* wheels/* python/* cache; do '
        '[ -e "$F" ] || continue; N="${F##*/}"; '
        'printf "%s\\n" "$K" | grep -Fqx -e "$N" -e "$N.tar.gz" && continue; '
        'case "$F" in env/*) ps -A -o args= 2>/dev/null | grep -F "$PWD/$F/" | grep -v grep >/dev/null && '
        '{ echo "in use: $F"; continue; };; esac; '
        'rm -rf "$F" 2>/dev/null && echo "removed $F" || echo "cannot remove $F"; done; true'
    )
    answer = run(target, script, stdin=keep.encode(), timeout=300)
    return checked(target, answer, "old environments cannot be removed").out.splitlines()
