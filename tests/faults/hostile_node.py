"""A node whose supervisor is right and whose workers lie: `python -m tests.faults.hostile_node NAME PORT`."""

import os
import sys
import threading
from functools import partial

from mlxdist.node.link.sockets import DealerLink
from mlxdist.node.process import Worker
from mlxdist.node.supervisor import Supervisor

WAIT_SECONDS = 1200.0
COMMAND = ("-u", "-m", "tests.faults.hostile_worker")


def main(name: str, port: int) -> int:
    """Runs a node as `mlxdist node --wait 20m` does, with other workers."""
    link = DealerLink(f"tcp://127.0.0.1:{port}", f"{name}/{os.getpid()}".encode())
    start = partial(Worker.start, command=COMMAND)
    supervisor = Supervisor(name, "127.0.0.1", link, launched=False, wait_seconds=WAIT_SECONDS, start_worker=start)
    code = supervisor.run(threading.Event())
    print(supervisor.reason)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
