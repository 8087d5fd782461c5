"""A wall clock that a test can set for one process, by libfaketime. The monotonic clock of the process stays."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@cache
def library() -> str:
    """Returns the path of libfaketime, installed from Debian's packages when root may; empty where there is none."""
    if sys.platform != "linux":
        return ""
    found = _installed()
    if not found and os.geteuid() == 0 and shutil.which("apt-get"):
        for command in (["apt-get", "update"], ["apt-get", "install", "-y", "libfaketime"]):
            subprocess.run(command, capture_output=True, timeout=120, check=False)
        found = _installed()
    return found


def _installed() -> str:
    return next((str(path) for path in Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")), "")


@dataclass(frozen=True)
class WallClock:
    """The wall clock of the processes that are started with `environment`."""

    offset: Path

    @classmethod
    def new(cls, file: Path) -> "WallClock":
        """Returns a clock that is right, and reads its offset from a file of its own."""
        clock = cls(file)
        clock.set(0.0)
        return clock

    @property
    def environment(self) -> dict[str, str]:
        """The environment that gives a process this clock."""
        return {
            "LD_PRELOAD": library(),
            "FAKETIME_TIMESTAMP_FILE": str(self.offset),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }

    def set(self, hours: float) -> None:
        """Sets the clock so many hours ahead of the right time."""
        aside = self.offset.with_suffix(".aside")
        aside.write_text(f"{hours * 3600:+.0f}\n")
        aside.rename(self.offset)
