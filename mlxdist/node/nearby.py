"""The coordinator to work for, where a person names none: one that is known, or one that Bonjour finds."""

from collections.abc import Sequence

from mlxdist.bonjour import Service, find
from mlxdist.keys.exchange import KIND, SHOWN_DIGITS
from mlxdist.keys.store import KeyStore, Trusted
from mlxdist.node.pairing import Joined, Place, of
from mlxdist.protocol.errors import UserError
from mlxdist.protocol.untrusted import quoted

ASK = "give the address that `mlxdist launch --invite` prints, as mlxdist join mini-1.local"


def look_for(store: KeyStore, name: str) -> Joined | Place:
    """Returns the coordinator to work for, or where to ask for the first time. Raises UserError where it is unclear."""
    trusted = store.coordinators()
    try:
        found = find(KIND, ASK)
    except UserError:
        if not trusted:
            raise
        found = []
    return chosen(store, trusted, found, name)


def chosen(store: KeyStore, trusted: Sequence[Trusted], found: Sequence[Service], name: str) -> Joined | Place:
    """Returns a coordinator that is known and has a run now, else the one that is known, else the one that is there.

    Raises UserError where there are several, with the commands, or none.
    """
    digits = {each.public[:SHOWN_DIGITS]: each for each in trusted}
    there = {service.texts.get("key", ""): service for service in found}
    running = [(digits[key], there[key]) for key in digits if key in there]
    if len(running) == 1:
        (one, service), *_ = running
        return of(store, one, place_of_service(service), name)
    if not running and len(trusted) == 1:
        return of(store, trusted[0], Place(trusted[0].host), name)
    if not trusted and len(found) == 1:
        return place_of_service(found[0])
    if not trusted and not found:
        raise UserError(f"no run that takes Macs was found in this network: {ASK}")
    there_now = [service for _, service in running] if trusted else found
    choices = [choice(place_of_service(service), service.host) for service in there_now]
    choices = choices or [choice(Place(each.host)) for each in trusted]
    raise UserError(f"there are {len(choices)} coordinators to choose from, so type one of: {' | '.join(choices)}")


def choice(place: Place, host: str = "") -> str:
    """Returns the command for one of several coordinators; `host`: its name, where the place is an address."""
    name = f" ({quoted(host, 80)})" if host not in ("", place.host) else ""
    return f"mlxdist join {quoted(str(place), 80)}{name}"


def place_of_service(service: Service) -> Place:
    """Returns where a service is: its address where Bonjour has told one, since not every system knows its name."""
    return Place(service.texts.get("address") or service.host, service.port)
