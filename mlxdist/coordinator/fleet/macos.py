"""Everything that is asked of macOS itself, in one place; elsewhere each answer is empty."""

import sys


def keep_awake() -> list[str]:
    """The words before a command that keep a Mac from sleeping while it runs; none on other systems."""
    return ["/usr/bin/caffeinate", "-is"] if sys.platform == "darwin" else []
