"""The words of the link check of `mlxdist doctor`: one frame that says the kind, then its payload.

A node asks for its turn, measures round trips on the control port, then both directions on the data port.
"""

READY, GO, PING, UP, DOWN, END = b"ready", b"go", b"ping", b"up", b"down", b"end"
BLOCK = 1 << 20  # bytes of a message, as in a run
BLOCKS = 16  # messages in each direction
EVERY = frozenset((READY, PING, UP, DOWN, END))  # kinds that a node may send
