"""The things that a node is started with: its keys, the coordinator as it reaches it, the model on its host."""

from collections.abc import Mapping, Sequence

from mlxdist.coordinator.config.hosts import CoordinatorHost, NodeSpec, dialed_address, is_local
from mlxdist.coordinator.fleet.access import Access
from mlxdist.coordinator.launch.roster import Roster
from mlxdist.coordinator.launch.supervisors import Start
from mlxdist.keys.pair import keys_line
from mlxdist.protocol.launched import LaunchOrder
from mlxdist.protocol.transport import CONTROL, DATA

ANY = ("auto", "*", "0.0.0.0", "::")  # coordinator.bind that names no address to dial


def starts_of(
    nodes: Sequence[NodeSpec],
    roster: Roster,
    coordinator: CoordinatorHost,
    ports: Mapping[str, int],
    access: Access | None,
    away_seconds: float,
) -> list[Start]:
    """Returns the starts of `nodes`. `ports`: those that the coordinator has opened; `access`: None without keys.

    A node on another host takes the address to dial from its own SSH_CONNECTION, unless coordinator.bind names one.
    Raises UserError for a key that cannot be used.
    """
    here = dialed_address(coordinator.bind)
    made = []
    for node in nodes:
        local = is_local(node.host)
        keys = None
        if access is not None:
            keys = access.keys_for(node.name) if local else access.keys_for_host(node.name)
        host = here
        forwards: tuple[tuple[str, int], ...] = ()
        if not local and node.transport == "ssh":
            forwards = tuple((here, ports[channel]) for channel in (CONTROL, DATA))
        elif not local:
            host = "" if coordinator.bind in ANY else coordinator.bind
        seen = roster.seen.get(node.name)
        model = seen.models[0] if seen is not None and seen.models else node.model
        models = f"{node.workdir}/models" if node.workdir and not local else ""
        order = LaunchOrder(host, ports[CONTROL], model=model, models=models, wait_seconds=away_seconds)
        made.append(Start(node, keys_line(keys), order, forwards))
    return made
