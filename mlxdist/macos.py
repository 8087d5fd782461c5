"""Everything that is asked of macOS, in one place; on Linux, the nearest answer there is.

An answer that is not understood is unknown: None, or empty. The tests hold outputs of each command.
"""

import math
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from mlxdist.protocol.limits import Heat

ANSWER_SECONDS = 2.0

# Commands for a script; of a login without a terminal, PATH has no /usr/sbin.
RELEASE = "/usr/bin/sw_vers -productVersion"  # prints 15.3.1
CHIP = "/usr/sbin/sysctl -n machdep.cpu.brand_string"  # prints Apple M4 Pro
MEMORY = "/usr/sbin/sysctl -n hw.memsize"  # prints bytes
HAS_TOOLS = "/usr/bin/xcode-select -p >/dev/null 2>&1"  # without them, /usr/bin/python3 opens a window
IDLE = "/usr/sbin/ioreg -c IOHIDSystem -d 4"  # prints "HIDIdleTime" = nanoseconds, among others
POWER = "/usr/bin/pmset -g batt"  # prints Now drawing from 'AC Power', or 'Battery Power'
HEAT = "/usr/bin/pmset -g therm"  # prints CPU_Speed_Limit = 100, on some Macs; no command says the temperature
PRESSURE = "/usr/bin/notifyutil -g com.apple.system.thermalpressurelevel"  # prints the name, and 0 to 4
PRESSURES: tuple[Heat, ...] = ("nominal", "moderate", "heavy", "trapping", "sleeping")

FIREWALL = "/usr/libexec/ApplicationFirewall/socketfilterfw"
UPDATES = "/Library/Preferences/com.apple.SoftwareUpdate"
# Each part is a command that needs no administrator; its output follows its name in brackets.
SETTINGS_SCRIPT = "; ".join(
    f'echo "[{name}]"; {command} 2>&1'
    for name, command in (
        ("power", "/usr/bin/pmset -g"),
        ("source", POWER),
        ("filevault", "/usr/bin/fdesetup status"),
        ("updates", f"/usr/bin/defaults read {UPDATES} AutomaticallyInstallMacOSUpdates"),
        ("firewall", f"{FIREWALL} --getglobalstate"),
        ("block all", f"{FIREWALL} --getblockall"),
    )
)

# The socket option that describes a TCP connection, and the place of the bytes received in the answer:
# struct tcp_connection_info of macOS, struct tcp_info of Linux.
RECEIVED_OF_CONNECTION = (socket.IPPROTO_TCP, 0x106, 88) if sys.platform == "darwin" else (socket.IPPROTO_TCP, 11, 128)


def keep_awake() -> list[str]:
    """The words before a command that keep a Mac from sleeping while it runs; none on other systems."""
    return ["/usr/bin/caffeinate", "-is"] if sys.platform == "darwin" else []


@dataclass(frozen=True)
class MacSettings:
    """The settings of a Mac that matter to a run. None: unknown."""

    sleep_minutes: int | None = None  # idle time until it sleeps; 0 = never
    low_power: bool | None = None
    on_battery: bool | None = None
    wakes_for_network: bool | None = None
    restarts_after_power_loss: bool | None = None
    filevault: bool | None = None
    updates_itself: bool | None = None  # macOS is updated, and the Mac restarted, without a person
    firewall: bool | None = None
    firewall_blocks_all: bool | None = None


def read_settings(printed: str) -> MacSettings:
    """Returns the settings in the output of SETTINGS_SCRIPT."""
    parts: dict[str, str] = {}
    for part in re.split(r"(?m)^\[(?=[a-z ]+\]$)", printed)[1:]:
        name, _, text = part.partition("]\n")
        parts[name] = text
    power = dict(re.findall(r"(?m)^\s*([A-Za-z]\w*)\s+(\d+)\b", parts.get("power", "")))
    sleep = power.get("sleep")
    return MacSettings(
        sleep_minutes=int(sleep) if sleep is not None else None,
        low_power=_flag(power.get("lowpowermode")),
        on_battery=on_battery(parts.get("source", "")),
        wakes_for_network=_flag(power.get("womp")),
        restarts_after_power_loss=_flag(power.get("autorestart")),
        filevault=_either(parts.get("filevault", ""), r"FileVault is On", r"FileVault is Off"),
        updates_itself=_either(parts.get("updates", ""), r"^(1|true|YES)$", r"^(0|false|NO)$"),
        firewall=_either(parts.get("firewall", ""), r"\(State = [12]\)", r"\(State = 0\)"),
        firewall_blocks_all=_either(
            parts.get("block all", ""), r"State = 2|block all \w+ enabled", r"block all.*disabled"
        ),
    )


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


@dataclass(frozen=True)
class Strain:
    """The strain on this machine. `swap_bytes`: of its swap, in use; -1: unknown. `heat`: as macOS calls it."""

    swap_bytes: int = -1
    heat: Heat = ""


def strain_on_this_mac() -> Strain:
    """Returns how much this machine swaps, and the pressure of its heat."""
    swap = -1
    with suppress(OSError, RuntimeError):  # psutil raises either where the system does not say it
        swap = int(psutil.swap_memory().used)
    return Strain(swap, heat_of(answer(PRESSURE)) if sys.platform == "darwin" else "")


def heat_of(printed: str) -> Heat:
    """Returns the thermal pressure in the output of PRESSURE."""
    found = re.fullmatch(r"com\.apple\.system\.thermalpressurelevel ([0-4])\s*", printed)
    return PRESSURES[int(found[1])] if found else ""


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


def answer(command: str) -> str:
    """Returns what a command prints; "" where it fails, or does not end in time."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            shlex.split(command), stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_SECONDS
        )
        if done.returncode == 0:
            return done.stdout.decode(errors="replace")
    return ""


def _flag(value: str | None) -> bool | None:
    return {"0": False, "1": True}.get(value or "")


def _either(text: str, yes: str, no: str) -> bool | None:
    """Returns True or False by the pattern that the text has; None when it has neither."""
    if re.search(yes, text, re.MULTILINE | re.IGNORECASE):
        return True
    return False if re.search(no, text, re.MULTILINE | re.IGNORECASE) else None
