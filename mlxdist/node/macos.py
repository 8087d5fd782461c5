"""Everything that a node asks macOS about itself, in one place; on Linux the nearest answer there is.

An answer that is not understood is empty: unknown. The tests hold outputs of each command.
"""

import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

ANSWER_SECONDS = 2.0
CHIP = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")  # prints Apple M4 Pro


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
