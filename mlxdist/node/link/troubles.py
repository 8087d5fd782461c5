"""Sentences on a connection that cannot be made: what the other side does, and what a person can type."""

from mlxdist.keys.pair import NodeKeys
from mlxdist.protocol.transport import Trouble

WITH_KEY = "start this node with --coordinator KEY; on the Mac that launches, `mlxdist nodes` shows the key"


def sentence_on(trouble: Trouble, place: str, name: str, keys: NodeKeys | None) -> str:
    """Returns the sentence on a trouble with the coordinator at `place` (HOST:PORT) for the node `name`."""
    match trouble:
        case Trouble.KEY_REFUSED if keys is not None:
            return (
                f"the coordinator at {place} does not accept the key of this node: on the Mac that launches, type "
                f"`mlxdist nodes admit {name} {keys.public}`, or launch with --invite and join again here by the code "
                "(mlxdist join HOST --again)"
            )
        case Trouble.ENCRYPTION if keys is not None:
            return (
                f"the coordinator at {place} does not encrypt, so this node does not work for it: leave --insecure-lan "
                "out where the run is launched"
            )
        case Trouble.ENCRYPTION:
            return f"the coordinator at {place} takes encrypted connections only: {WITH_KEY}"
        case _ if keys is not None:
            return (
                f"{place} ends the encrypted connection: it has another key than {keys.coordinator}, which this node "
                "trusts, or does not encrypt, or is no coordinator. On the Mac that launches, `mlxdist nodes` shows "
                "its key; if it has a new one, start this node with --coordinator KEY, or join again by a code "
                "(mlxdist join HOST --again)"
            )
        case _:
            return f"{place} ends the connection: it is no coordinator, or takes encrypted connections only: {WITH_KEY}"
