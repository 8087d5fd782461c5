"""The Macs with Remote Login in this network, as Bonjour names them."""

from mlxdist.bonjour import find

SERVICE = "_ssh._tcp"


def nearby_hosts() -> list[str]:
    """Returns the names of hosts that offer ssh, as ssh takes them. Raises UserError where nothing can look."""
    return sorted({service.host for service in find(SERVICE, "name them, as mlxdist hosts init mini-1")})
