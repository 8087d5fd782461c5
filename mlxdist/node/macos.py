"""Everything that a node asks macOS about itself, in one place; on Linux the nearest answer there is.

An answer that is not understood is empty: unknown. The tests hold outputs of each command.
"""

import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ANSWER_SECONDS = 2.0
CHIP = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")  # prints Apple M4 Pro

IDLE = ("/usr/sbin/ioreg", "-c", "IOHIDSystem", "-d", "4")  # prints "HIDIdleTime" = nanoseconds, among others
POWER = ("/usr/bin/pmset", "-g", "batt")  # prints Now drawing from 'AC Power', or 'Battery Power'

HEAT = ("/usr/bin/pmset", "-g", "therm")  # prints CPU_Speed_Limit = 100, on some Macs; no command says the temperature


@dataclass(frozen=True)
class Use:
    """The use of this machine by a person. None: unknown."""

    idle_seconds: float | None  # since a key or the mouse was last touched
    on_battery: bool | None


def use_of_this_mac() -> Use:
    """Returns how long this machine has been idle, and from where it has its power."""
    if sys.platform == "darwin":
        return Use(idle_seconds(answer(IDLE)), on_battery(answer(POWER)))
    battery = psutil.sensors_battery()
    terminals = [f"/dev/{each.terminal}" for each in psutil.users() if each.terminal]
    return Use(terminals_idle(terminals, time.time()), None if battery is None else not battery.power_plugged)


def idle_seconds(printed: str) -> float | None:
    """Returns the idle time in the output of IDLE."""
    found = re.search(r'"HIDIdleTime" = (\d{1,19})\b', printed)
    return int(found[1]) / 1e9 if found else None


def on_battery(printed: str) -> bool | None:
    """Returns the source of power in the output of POWER."""
    found = re.search(r"drawing from '(AC|Battery|UPS) Power'", printed)
    return found[1] != "AC" if found else None


def speed_limit() -> int | None:
    """Returns the percentage of its full speed at which the processor runs for its heat; None: unknown."""
    return limit_of(answer(HEAT)) if sys.platform == "darwin" else None


def limit_of(printed: str) -> int | None:
    """Returns the limit in the output of HEAT."""
    found = re.search(r"CPU_Speed_Limit\s*=\s*(\d{1,3})\b", printed)
    return int(found[1]) if found else None


def terminals_idle(terminals: Sequence[str], now: float) -> float:
    """Returns the seconds since someone typed at one of the terminals; infinity where there is none."""
    ages = [math.inf]
    for terminal in terminals:
        with suppress(OSError):
            ages.append(max(now - os.stat(terminal).st_atime, 0.0))
    return min(ages)


def chip() -> str:
    """Returns the name of this machine's processor; "" where it is unknown."""
    if sys.platform == "darwin":
        return answer(CHIP).strip()[:80]
    with suppress(OSError):
        return linux_chip(Path("/proc/cpuinfo").read_text(errors="replace"))
    return ""


def linux_chip(cpuinfo: str) -> str:
    """Returns the processor in the text of /proc/cpuinfo; "" where it has none, as on most ARM boards."""
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return found[1].strip()[:80] if found else ""


def answer(command: tuple[str, ...]) -> str:
    """Returns what a command prints; "" where it fails, or does not end in time."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_SECONDS)
        if done.returncode == 0:
            return done.stdout.decode(errors="replace")
    return ""
