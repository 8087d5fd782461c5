"""Takes most of a processor away from a process: by a control group where one can be made, else by a competing load."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PERIOD, QUOTA = 20_000, 1_000  # microseconds: a twentieth of one processor
RIVALS = 12  # busy processes beside one on its core, where there are no control groups
MOST_SECONDS = 90  # after which a rival ends in any case


@contextmanager
def throttled(pid: int) -> Iterator[str]:
    """Gives a process a small part of a processor until the block ends; yields the name of the way."""
    with ExitStack() as stack:
        for way in (_group_v2, _group_v1):
            with suppress(OSError):
                stack.enter_context(way(pid))
                yield way.__name__
                return
        stack.enter_context(_rivals(pid))
        yield "rivals"


@contextmanager
def _group_v2(pid: int) -> Iterator[None]:
    with _group(CGROUPS, pid, "0::") as group:
        (group / "cpu.max").write_text(f"{QUOTA} {PERIOD}")
        yield


@contextmanager
def _group_v1(pid: int) -> Iterator[None]:
    with _group(CGROUPS / "cpu", pid, ":cpu") as group:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD))
        (group / "cpu.cfs_quota_us").write_text(str(QUOTA))
        yield


@contextmanager
def _group(root: Path, pid: int, line: str) -> Iterator[Path]:
    """A new group below the root that holds the process; at the end the process returns to its own group."""
    if not (root / "cgroup.procs").exists():
        raise FileNotFoundError(root)
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    home = root / next(text for text in lines if line in text).split(":", 2)[2].lstrip("/")
    group = root / f"mlxdist-test-{os.getpid()}-{pid}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(pid))
        yield group
    finally:
        with suppress(OSError):  # the process has ended
            (home / "cgroup.procs").write_text(str(pid))
        group.rmdir()


@contextmanager
def _rivals(pid: int) -> Iterator[None]:
    """Busy processes on the one core that the process may use."""
    before = os.sched_getaffinity(pid)
    core = {max(before)}
    busy = f"import time\nend = time.monotonic() + {MOST_SECONDS}\nwhile time.monotonic() < end: pass"
    rivals = [subprocess.Popen([sys.executable, "-c", busy]) for _ in range(RIVALS)]
    try:
        for one in (pid, *(rival.pid for rival in rivals)):
            _pin(one, core)
        yield
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()
        with suppress(OSError):
            _pin(pid, before)


def _pin(pid: int, cores: set[int]) -> None:
    """Restricts all threads of a process to these cores."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)
