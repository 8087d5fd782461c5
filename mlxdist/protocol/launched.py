"""The second line that a launched node reads from its standard input, after its keys: where to go, with which model.

It names what is known only when the connection to its host is made, and nothing that a process list should not show.
"""

import msgspec

from mlxdist.protocol.errors import UserError
from mlxdist.protocol.limits import ModelName, Port, Seconds

AWAY = 75  # the exit code of a launched node that heard nothing of its coordinator: it may be started again


class LaunchOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The coordinator as this node reaches it, and what is this node's own."""

    host: str  # "": the address from which the ssh connection to the node came
    port: Port
    data_port: Port = 0  # where a tunnel leads to the data port; 0: as the coordinator says
    model: ModelName = ""  # a folder on this node's host; "": as the run says
    models: ModelName = ""  # the folder there for models that come from the coordinator; "": ~/mlxdist/models
    wait_seconds: Seconds = 600.0  # without a word from the coordinator, until the node leaves


def order_line(order: LaunchOrder) -> bytes:
    """Returns the line for a node's standard input."""
    return msgspec.json.encode(order) + b"\n"


def order_of_line(line: bytes) -> LaunchOrder:
    """Returns the order in such a line. Raises UserError."""
    try:
        return msgspec.json.decode(line, type=LaunchOrder)
    except msgspec.DecodeError:
        raise UserError(
            "a node started with --launched reads its coordinator from the second line of its standard input, and that "
            "line names none: start it with `mlxdist launch`, or with --connect HOST:PORT and without --launched"
        ) from None
