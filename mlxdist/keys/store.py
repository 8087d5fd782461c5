"""The keys of this Mac and of those that it knows, in one folder of the user's home:

    node.key         this Mac as a node: its pair
    coordinator.key  this Mac as a coordinator: its pair; a run keeps a copy, which --resume uses
    nodes/NAME       a node that may take part in runs of this Mac: its public key, or its pair where it was made here
    coordinators/HOST  a coordinator that this Mac trusts, by the host of --connect: its public key

A name is bound to one key, and a key to one name.
"""

import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from mlxdist.keys.files import read_private, write_private
from mlxdist.keys.pair import Pair, PublicKey, SecretKey, new_pair
from mlxdist.protocol.errors import UserError
from mlxdist.protocol.untrusted import NODE_NAME, quoted

FOLDER = ".mlxdist"  # in the home folder


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A node or a coordinator that is known, since a time in ISO 8601. `secret`: only of a node whose key we made."""

    public: PublicKey
    since: str
    secret: SecretKey | None = None

    def __repr__(self) -> str:
        return f"Known(public={self.public!r}, since={self.since!r})"


@dataclass(frozen=True)
class KeyStore:
    """A folder of keys. Making the value touches no disk."""

    folder: Path

    @classmethod
    def of_user(cls) -> "KeyStore":
        """Returns the store in the home folder of the user."""
        return cls(Path.home() / FOLDER)

    # ---- this Mac

    def own_pair(self) -> Pair:
        """Returns the pair of this Mac as a node; it is made when there is none."""
        return made_once(self.folder / "node.key")

    def coordinator_pair(self) -> Pair:
        """Returns the pair of this Mac as a coordinator; it is made when there is none."""
        return made_once(self.folder / "coordinator.key")

    # ---- nodes, at the coordinator

    @property
    def nodes(self) -> Path:
        """The folder of the nodes that are known."""
        return self.folder / "nodes"

    def known_nodes(self) -> tuple[dict[str, Known], list[str]]:
        """Returns the nodes by name, and a sentence for each file that cannot be used: its node is not admitted."""
        found, faults = dict[str, Known](), list[str]()
        for path in sorted(self.nodes.glob("[!.]*")) if self.nodes.is_dir() else ():
            try:
                found[path.name] = read_private(path, Known)
            except UserError as error:
                faults.append(str(error))
        return found, faults

    def admit(self, name: str, public: str, *, now: datetime) -> None:
        """Lets the node with this key take part, under this name only.

        Raises UserError where the name has another key, or the key another name, and for a name that cannot be one.
        """
        path = self._node(name)
        for other, known in self.known_nodes()[0].items():
            if other.casefold() == name.casefold() and known.public != public:
                raise UserError(
                    f"a node named {other} is known with another key: if it has a new one, type first: "
                    f"mlxdist nodes forget {other}"
                )
            if known.public == public and other != name:
                raise UserError(
                    f"this key belongs to the node {other}: give that name, or type first: mlxdist nodes forget {other}"
                )
        if not path.exists():
            write_private(path, Known(public, now.astimezone(UTC).isoformat(timespec="seconds")))

    def node_pair(self, name: str, *, now: datetime) -> Pair:
        """Returns the pair of a node whose keys are made here and sent to it over ssh; it is made when there is none.

        Raises UserError for a node that was admitted with a key of its own.
        """
        path = self._node(name)
        if not path.exists():
            pair = new_pair()
            since = now.astimezone(UTC).isoformat(timespec="seconds")
            write_private(path, Known(pair.public, since, pair.secret))
            return pair
        known = read_private(path, Known)
        if known.secret is None:
            raise UserError(
                f"the node {name} was admitted with a key of its own, so it is started by hand. To start it from here, "
                f"type first: mlxdist nodes forget {name}"
            )
        return Pair(known.public, known.secret)

    def forget(self, name: str) -> bool:
        """Takes a node off the list; a run that goes on hears nothing from it any more. False: it was not known."""
        try:
            self._node(name).unlink()
        except FileNotFoundError:
            return False
        return True

    def _node(self, name: str) -> Path:
        if not NODE_NAME.fullmatch(name):
            raise UserError(
                f"a node cannot be named {quoted(name, 80)!r}: a name has letters, digits, points, dashes, underscores"
            )
        return self.nodes / name

    # ---- coordinators, at the node

    def trust(self, host: str, public: str, *, now: datetime) -> None:
        """Notes the key of the coordinator at a host."""
        write_private(self._coordinator(host), Known(public, now.astimezone(UTC).isoformat(timespec="seconds")))

    def trusted(self, host: str) -> str | None:
        """Returns the public key of the coordinator at a host; None: it is not known."""
        path = self._coordinator(host)
        return read_private(path, Known).public if path.exists() else None

    def _coordinator(self, host: str) -> Path:
        return self.folder / "coordinators" / re.sub(r"[^a-z0-9_%:-]|^\.", "_", host.lower())


def made_once(path: Path, pair: Pair | None = None) -> Pair:
    """Returns the pair in a file; where there is none, `pair` or a new one is written there."""
    if not os.path.lexists(path):
        write_private(path, pair or new_pair())
    return read_private(path, Pair)
