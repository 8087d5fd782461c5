"""States of a node as a person is told of them: those in which it works, and the loss of one."""

WORKING = ("ready", "busy")
LOST = ("dead", "left")
TROUBLE = ("suspect", *LOST)  # a person wants to know of them


def is_loss(before: str, state: str) -> bool:
    """Returns True if a node was lost: it is gone, or connects again after it has worked, so its worker has ended."""
    return state in LOST or (state == "connecting" and before in (*WORKING, "suspect"))
