"""Everything that is asked of macOS itself, in one place; elsewhere each answer is empty."""

import sys

RELEASE = "sw_vers -productVersion"  # prints 15.3.1


def keep_awake() -> list[str]:
    """The words before a command that keep a Mac from sleeping while it runs; none on other systems."""
    return ["/usr/bin/caffeinate", "-is"] if sys.platform == "darwin" else []
