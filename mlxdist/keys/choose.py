"""The keys with which a node that was started by hand connects, or the sentence that refuses to connect without."""

import ipaddress
from datetime import UTC, datetime
from pathlib import Path

from mlxdist.keys.files import read_private
from mlxdist.keys.pair import NodeKeys, public_key
from mlxdist.keys.store import KeyStore
from mlxdist.protocol.errors import UserError

INSECURE = (
    "--insecure-lan: nothing on this connection is encrypted or checked, so everyone on the network can read the "
    "training data and the adapter, change the gradients, and end the run"
)


def chosen_keys(
    store: KeyStore, name: str, host: str, *, coordinator: str, file: Path | None, insecure_lan: bool
) -> NodeKeys | None:
    """Returns the keys for the coordinator at `host`; None: a connection without encryption.

    `coordinator`: its public key, which is kept for the next time; `file`: keys that lie elsewhere.

    Raises UserError where keys are missing, contradict each other, or may be read by others.
    """
    given = [word for word, is_given in (("--coordinator", coordinator), ("--keys", file)) if is_given]
    if insecure_lan:
        if given:
            raise UserError(f"--insecure-lan connects without keys, and {given[0]} gives one: leave one of the two out")
        return None
    if len(given) > 1:
        raise UserError("--keys names a file that holds the coordinator's key: leave --coordinator out")
    if file is not None:
        return read_private(file, NodeKeys)
    if coordinator:
        store.trust(host, public_key(coordinator), now=datetime.now(UTC))
    trusted = store.trusted(host)
    if trusted is None and is_loopback(host):
        return None
    if trusted is None:
        public = store.own_pair().public
        raise UserError(
            f"this Mac knows no key of the coordinator at {host}, and connects beyond itself only with keys. On the "
            f"Mac that launches, type `mlxdist nodes admit {name} {public}`, which prints the command for this Mac"
        )
    return NodeKeys(store.own_pair().secret, trusted)


def is_loopback(host: str) -> bool:
    """Returns True when a connection to `host` stays on this machine. No name is looked up."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
