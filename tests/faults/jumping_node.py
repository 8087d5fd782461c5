"""A node whose monotonic clock goes 8 hours ahead at SIGUSR1: `python -m tests.faults.jumping_node NAME PORT`."""

import os
import signal
import sys
import threading
import time

from mlxdist.node.link.sockets import DealerLink
from mlxdist.node.supervisor import Supervisor

JUMP_SECONDS = 8 * 3600.0
WAIT_SECONDS = 1200.0


class JumpingClock:
    """Monotonic seconds, plus the seconds of all jumps."""

    def __init__(self) -> None:
        self.slept = 0.0

    def __call__(self) -> float:
        """Returns the time of this clock, in seconds."""
        return time.monotonic() + self.slept

    def jump(self) -> None:
        """Moves the clock 8 hours ahead."""
        self.slept += JUMP_SECONDS


def main(name: str, port: int) -> int:
    """Runs a node as `mlxdist node --wait 20m` does."""
    clock = JumpingClock()
    signal.signal(signal.SIGUSR1, lambda *_: clock.jump())
    link = DealerLink(f"tcp://127.0.0.1:{port}", f"{name}/{os.getpid()}".encode())
    supervisor = Supervisor(name, "127.0.0.1", link, launched=False, wait_seconds=WAIT_SECONDS, clock=clock)
    code = supervisor.run(threading.Event())
    print(supervisor.reason)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
