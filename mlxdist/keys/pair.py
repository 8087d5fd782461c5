"""Key pairs of CURVE (Curve25519), in hex: 64 characters that a person can copy and a shell does not change.

A secret half is never part of a repr, an error, a command line, an environment or a log.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from mlxdist.protocol.errors import UserError
from mlxdist.protocol.untrusted import quoted

KEY = r"^[0-9a-f]{64}\Z"
MOST_LINE = 4096  # characters of a line on standard input

PublicKey = Annotated[str, Meta(pattern=KEY)]
SecretKey = Annotated[str, Meta(pattern=KEY)]


class Pair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A public key and its secret half."""

    public: PublicKey
    secret: SecretKey

    def __repr__(self) -> str:
        return f"Pair(public={self.public!r})"


class NodeKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that a node needs for an encrypted connection: its own secret, and the public key of its coordinator."""

    secret: SecretKey
    coordinator: PublicKey

    def __repr__(self) -> str:
        return f"NodeKeys(coordinator={self.coordinator!r})"

    @property
    def public(self) -> str:
        """The public half of the node's own key."""
        return public_of(self.secret)


def new_pair() -> Pair:
    """Returns a new random pair."""
    import zmq
    from zmq.utils import z85

    public, secret = zmq.curve_keypair()
    return Pair(z85.decode(public).hex(), z85.decode(secret).hex())


def public_of(secret: str) -> str:
    """Returns the public half of a secret key."""
    import zmq
    from zmq.utils import z85

    return z85.decode(zmq.curve_public(z85.encode(bytes.fromhex(secret)))).hex()


def public_key(text: str) -> str:
    """Returns a public key that a person has typed. Raises UserError for anything else."""
    try:
        return msgspec.convert(text.strip().lower(), PublicKey)
    except msgspec.ValidationError:
        raise UserError(
            f"{quoted(text, 80)!r} is no public key: it has 64 digits and letters from a to f, as `mlxdist key` and "
            "`mlxdist nodes` print it"
        ) from None


def keys_line(keys: NodeKeys | None) -> bytes:
    """Returns the line that a launched node reads first from its standard input. None: without encryption."""
    return msgspec.json.encode(keys) + b"\n"


def keys_of_line(line: bytes) -> NodeKeys | None:
    """Returns the keys in such a line. Raises UserError, without the line: it may hold a secret."""
    try:
        return msgspec.json.decode(line, type=NodeKeys | None)
    except msgspec.DecodeError:
        raise UserError(
            "a node started with --launched reads its keys from the first line of its standard input, and that line "
            "holds none: start it with `mlxdist launch`, or without --launched"
        ) from None
