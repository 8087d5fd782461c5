"""A run on the host that it was sent to: started there apart from every terminal, followed, stopped.

    python -m mlxdist.coordinator.launch.detached start FOLDER WORDS…    # of mlxdist launch
    python -m mlxdist.coordinator.launch.detached follow FOLDER         # prints what it has printed and prints
    python -m mlxdist.coordinator.launch.detached stop FOLDER           # as Ctrl-C does

The folder holds launch.log, the process id of the run, and its exit code once it has ended.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from mlxdist.macos import keep_awake

LOG, PID, EXIT = "launch.log", "pid", "exit"
LOOK_SECONDS = 0.2
NOTHING = 3  # the exit code when no run was started in the folder, or it ended without a word
AWAY = 4  # the exit code when the viewer is gone


def start(folder: Path, words: Sequence[str]) -> int:
    """Starts a run unless one goes on in `folder`. Returns an exit code."""
    if running(folder):
        print(f"a run goes on in {folder}: look at it with --attach, or end it with --stop", file=sys.stderr)
        return 2
    (folder / EXIT).unlink(missing_ok=True)
    command = [*keep_awake(), sys.executable, "-u", "-m", __spec__.name, "carry", str(folder), *words]
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
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


def follow(folder: Path) -> int:
    """Prints the log of the run until it ends, and returns its exit code; AWAY at the end of standard input."""
    try:
        log = (folder / LOG).open("rb")
    except FileNotFoundError:
        print(f"no run was started in {folder}", file=sys.stderr)
        return NOTHING
    with log:
        while True:
            ended = (folder / EXIT).exists() or running(folder) is None  # before the last lines are read
            while data := log.read(65536):
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
            if ended:
                break
            if select.select([0], [], [], LOOK_SECONDS)[0] and not os.read(0, 4096):
                return AWAY
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
    until = time.monotonic() + seconds
    while running(folder) is not None and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
    return 0 if running(folder) is None else 1


def main(verb: str, folder: str, *words: str) -> int:
    """Does what the command line says."""
    place = Path(folder)
    match verb:
        case "start":
            return start(place, words)
        case "carry":
            return carry(place, words)
        case "follow":
            return follow(place)
        case "stop":
            return stop(place)
    raise ValueError(verb)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
