"""The process that measures the memory of a model's layers on this machine, in a worker's environment.

It reads one line from standard input (`ProbeOrder`) and prints one (`ProbeAnswer`). It writes nothing.
"""

import sys

import msgspec

from mlxdist.node.work.blas import use_openblas
from mlxdist.protocol.memory_probe import ProbeAnswer, ProbeOrder


def answer(order: ProbeOrder) -> ProbeAnswer:
    """Returns what the model's layers take here. Raises what `layer_memory.measure` and `open_model` raise."""
    from mlxdist.node.work import model as models
    from mlxdist.node.work.layer_memory import measure

    opened = models.open_model(order.spec, lazy=True)
    models.add_lora(opened, order.spec, lambda sentence: None)
    return measure(opened.model, opened.vocab_size, chunked=order.spec.chunked, long=order.long)


def main() -> None:
    """Answers one order. A model that cannot be measured ends the process with one line on standard error."""
    use_openblas()
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=ProbeOrder)
    try:
        found = answer(order)
    except Exception as error:  # a model's own code raises what it likes; the coordinator shows the line
        sys.exit(" ".join((str(error) or type(error).__name__).split())[:300])
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
