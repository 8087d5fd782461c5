"""A worker that computes as it should, and lies about it: `python -m tests.faults.hostile_worker`, started by its node.

Its lie is the next one of those in the environment variable LIES, which a file counts: each worker has another one.
"""

import os
import queue
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from mlxdist.node.link.jobs import ComputeAssignment, Job, JobResults, Partial, Result
from mlxdist.node.process import Order
from mlxdist.node.work.blas import use_openblas
from mlxdist.node.worker import _read_orders, serve
from mlxdist.protocol import messages as m
from mlxdist.protocol.vectors import OutgoingVector

LIES, COUNT = "HOSTILE_LIES", "HOSTILE_COUNT"  # names, separated by commas; the file that counts the workers


def wrong(lie: str, result: Result) -> Result:
    """The result that is sent in place of a right one."""
    match lie, result:
        case "nan", Partial(ready=None):
            vector = result.vector.copy()
            vector[len(vector) // 2] = np.nan
            return replace(result, vector=vector)
        case "shape", (m.LeafAnswer() as answer, payload):
            return msgspec.structs.replace(answer, columns=answer.columns + 1), bytes(payload) + bytes(4)
        case "another's leaf", (m.LeafAnswer() as answer, payload):
            return msgspec.structs.replace(answer, leaf=answer.leaf + 1000), payload
    return result


def next_lie() -> str:
    """The lie of this worker; honest after the last one."""
    count, lies = Path(os.environ[COUNT]), os.environ[LIES].split(",")
    before = int(count.read_text()) if count.exists() else 0
    count.write_text(str(before + 1))
    return lies[before] if before < len(lies) else ""


def bend_vectors(lie: str) -> None:
    """Bends the way out of every partial of this process."""
    if lie == "hash":
        OutgoingVector.end = lambda self: "0" * 64  # type: ignore[method-assign]
    elif lie == "endless":
        OutgoingVector.all_sent = property(lambda self: False)  # type: ignore[method-assign,assignment]


def main() -> None:
    """Serves one session after another, as mlxdist.node.worker does."""
    use_openblas()
    from mlxdist.node.work.engine import Engine

    lie = next_lie()

    class Hostile(Engine):
        def perform(self, job: Job, session: m.SessionId, progress: Callable[[str], None]) -> JobResults:
            for result in super().perform(job, session, progress):
                yield wrong(lie, result) if isinstance(job, ComputeAssignment) else result

    bend_vectors(lie)
    orders: queue.Queue[Order] = queue.Queue()
    threading.Thread(target=_read_orders, args=(orders,), daemon=True).start()
    engine = Hostile()
    while True:
        finish = serve(orders.get(), orders, engine)
        if finish is not None and finish.refused:
            sys.exit(f"refused: {finish.reason}")


if __name__ == "__main__":
    main()
