"""The keys of a run's ports: the server's own, and those that are admitted, each bound to the name of a node."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from mlxdist.keys.pair import NodeKeys, Pair, new_pair
from mlxdist.keys.store import KeyStore, made_once
from mlxdist.protocol.errors import UserError

LOOK_SECONDS = 0.1  # between two looks at the store
TICK_SECONDS = 2.0  # of the coarsest clock of a file system
SERVER_KEY = "server.key"  # in the run's state


def open_access(state: Path, store: KeyStore, *, resume: bool) -> "Access":
    """Returns the list of those who may connect to a run. Raises UserError for a key file that cannot be used."""
    access = Access(server_pair(state, store, resume=resume), store)
    if faults := access.refresh():
        raise UserError("; ".join(faults))
    return access


def server_pair(state: Path, store: KeyStore, *, resume: bool) -> Pair:
    """Returns the pair of a run's ports: that of this Mac, or the one that the run has kept, which its nodes trust.

    Raises UserError for a key file that is damaged or open to others, SaveError where it cannot be written.
    """
    path = state / SERVER_KEY
    if not resume:
        path.unlink(missing_ok=True)  # of a run that never took a step
    return made_once(path, None if os.path.lexists(path) else store.coordinator_pair())


@dataclass
class Access:
    """The list of those who may connect. The store is read again when it changes, so that a run learns at once."""

    server: Pair
    store: KeyStore
    launched: dict[str, str] = field(default_factory=dict)  # name by public key, of nodes that this run starts
    _known: Mapping[str, str] = field(default_factory=dict)  # name by public key, from the store
    wall: Callable[[], float] = time.time
    _looked: float = 0.0
    _read: float | None = None  # when the store's folder had last changed, as it was read

    def name_of(self, public: str) -> str | None:
        """Returns the name of the node with this key; None: it is not admitted."""
        if name := self.launched.get(public):
            return name
        name = self._known.get(public)
        return None if name in self.launched.values() else name  # that name is the key's which this run has made

    def refresh(self) -> list[str]:
        """Reads the store again where it has changed. Returns a sentence for each file in it that cannot be used."""
        now = self.wall()
        if abs(now - self._looked) < LOOK_SECONDS:
            return []
        self._looked = now
        try:
            changed = self.store.nodes.stat().st_mtime
        except FileNotFoundError:
            changed = 0.0
        if changed == self._read:
            return []
        found, faults = self.store.known_nodes()
        self._known = {known.public: name for name, known in found.items()}
        # A second change may come within the same tick of the disk's clock, so a fresh one does not count as read.
        self._read = changed if now - changed > TICK_SECONDS else None
        return faults

    def keys_for(self, name: str) -> NodeKeys:
        """Returns the keys of a node on this machine, made for this run alone."""
        pair = new_pair()
        self.launched[pair.public] = name
        return NodeKeys(pair.secret, self.server.public)

    def keys_for_host(self, name: str) -> NodeKeys:
        """Returns the keys of a node that is started over ssh, which the store keeps. Raises UserError."""
        pair = self.store.node_pair(name, now=datetime.now(UTC))
        self.launched[pair.public] = name
        return NodeKeys(pair.secret, self.server.public)
