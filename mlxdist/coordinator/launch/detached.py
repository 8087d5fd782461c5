"""A run on the host that it was sent to: started there apart from every terminal, stopped, its end told.

    python -m mlxdist.coordinator.launch.detached start FOLDER WORDS…    # of mlxdist launch
    python -m mlxdist.coordinator.launch.detached result FOLDER         # once it has ended: its errors, its exit code
    python -m mlxdist.coordinator.launch.detached stop FOLDER           # as Ctrl-C does

The folder holds launch.log, launch.err, the process id of the run, and its exit code once it has ended. What the run
tells stands in its own output folder, from which it is shown.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from mlxdist.macos import keep_awake

LOG, ERRORS, PID, EXIT = "launch.log", "launch.err", "pid", "exit"
LOOK_SECONDS = 0.2
NOTHING = 3  # the exit code when no run was started in the folder, or it ended without a word


def start(folder: Path, words: Sequence[str]) -> int:
    """Starts a run unless one goes on in `folder`. Returns an exit code."""
    if running(folder):
        print(f"a run goes on in {folder}: look at it with --attach, or end it with --stop", file=sys.stderr)
        return 2
    (folder / EXIT).unlink(missing_ok=True)
    command = [*keep_awake(), sys.executable, "-u", "-m", __spec__.name, "carry", str(folder), *words]
    with (folder / LOG).open("wb") as log, (folder / ERRORS).open("wb") as errors:
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=errors, start_new_session=True
        )
    (folder / PID).write_text(f"{process.pid}\n")
    return 0


def carry(folder: Path, words: Sequence[str]) -> int:
    """Runs `mlxdist launch` with `words`, and writes its exit code where it can be found."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the run alone, which is in this process group
    code = subprocess.call(
        [sys.executable, "-u", "-m", "mlxdist", "launch", *words], cwd=folder, stdin=subprocess.DEVNULL
    )
    aside = folder / f"{EXIT}.aside"
    aside.write_text(f"{code}\n")
    aside.replace(folder / EXIT)
    return code


def running(folder: Path) -> psutil.Process | None:
    """Returns the process that carries the run of `folder`; None where it has ended."""
    with suppress(OSError, ValueError, psutil.Error):
        process = psutil.Process(int((folder / PID).read_text()))
        if str(folder) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def result(folder: Path, seconds: float = 45.0) -> int:
    """Prints the errors of a run that has told its end, and returns its exit code; NOTHING where there is none.

    Its process may need a moment more, to say goodbye to the nodes.
    """
    if not (folder / LOG).exists():
        print(f"no run was started in {folder}", file=sys.stderr)
        return NOTHING
    _wait(folder, seconds)
    with suppress(OSError):
        sys.stderr.write((folder / ERRORS).read_text(errors="replace"))
    with suppress(OSError, ValueError):
        return int((folder / EXIT).read_text())
    print("the run was killed, or its host was restarted: --resume continues it", file=sys.stderr)
    return NOTHING


def stop(folder: Path, seconds: float = 60.0) -> int:
    """Interrupts the run as Ctrl-C does, and waits until it has saved and ended. Returns an exit code."""
    process = running(folder)
    if process is None:
        print(f"no run goes on in {folder}", file=sys.stderr)
        return NOTHING
    os.killpg(process.pid, signal.SIGINT)
    _wait(folder, seconds)
    return 0 if running(folder) is None else 1


def _wait(folder: Path, seconds: float) -> None:
    """Waits until the run of a folder has ended, or so many seconds."""
    until = time.monotonic() + seconds
    while running(folder) is not None and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)


def main(verb: str, folder: str, *words: str) -> int:
    """Does what the command line says."""
    place = Path(folder)
    match verb:
        case "start":
            return start(place, words)
        case "carry":
            return carry(place, words)
        case "result":
            return result(place)
        case "stop":
            return stop(place)
    raise ValueError(verb)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
