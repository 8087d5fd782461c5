"""Everything that is asked of macOS itself, in one place; elsewhere each answer is empty, or Linux's.

An answer that is not understood is None: unknown. The tests hold outputs of each command.
"""

import re
import socket
import sys
from dataclasses import dataclass

# Commands for a script; of a login without a terminal, PATH has no /usr/sbin.
RELEASE = "/usr/bin/sw_vers -productVersion"  # prints 15.3.1
CHIP = "/usr/sbin/sysctl -n machdep.cpu.brand_string"  # prints Apple M4
MEMORY = "/usr/sbin/sysctl -n hw.memsize"  # prints bytes
HAS_TOOLS = "/usr/bin/xcode-select -p >/dev/null 2>&1"  # without them, /usr/bin/python3 opens a window

FIREWALL = "/usr/libexec/ApplicationFirewall/socketfilterfw"
UPDATES = "/Library/Preferences/com.apple.SoftwareUpdate"
# Each part is a command that needs no administrator; its output follows its name in brackets.
SETTINGS_SCRIPT = "; ".join(
    f'echo "[{name}]"; {command} 2>&1'
    for name, command in (
        ("power", "/usr/bin/pmset -g"),
        ("source", "/usr/bin/pmset -g batt"),
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
        on_battery=_either(parts.get("source", ""), r"drawing from 'Battery Power'", r"drawing from 'AC Power'"),
        wakes_for_network=_flag(power.get("womp")),
        restarts_after_power_loss=_flag(power.get("autorestart")),
        filevault=_either(parts.get("filevault", ""), r"FileVault is On", r"FileVault is Off"),
        updates_itself=_either(parts.get("updates", ""), r"^(1|true|YES)$", r"^(0|false|NO)$"),
        firewall=_either(parts.get("firewall", ""), r"\(State = [12]\)", r"\(State = 0\)"),
        firewall_blocks_all=_either(
            parts.get("block all", ""), r"State = 2|block all \w+ enabled", r"block all.*disabled"
        ),
    )


def _flag(value: str | None) -> bool | None:
    return {"0": False, "1": True}.get(value or "")


def _either(text: str, yes: str, no: str) -> bool | None:
    """Returns True or False by the pattern that the text has; None when it has neither."""
    if re.search(yes, text, re.MULTILINE | re.IGNORECASE):
        return True
    return False if re.search(no, text, re.MULTILINE | re.IGNORECASE) else None
