"""The exchange of keys between two Macs that know one code: SPAKE2, then a proof from each side.

    Hello       joiner -> coordinator     its name, its public key, its element of SPAKE2
    Answer      coordinator -> joiner     the port of the run, its public key, its element
    Proof       joiner -> coordinator     HMAC over Hello and Answer, with the key that both elements and the code give
    Granted     coordinator -> joiner     the joiner's name from now on; HMAC over all before and the name

The elements say nothing about the code to one who listens. One who takes part can try one code in an exchange: the
coordinator proves nothing before the joiner has, and counts. A changed key, name or port makes the proof wrong. Bytes
in, bytes out: no sockets here.

SPAKE2: Abdalla and Pointcheval, "Simple Password-Based Encrypted Key Exchange Protocols", CT-RSA 2005.
"""

import hmac
import secrets
from typing import Annotated, Protocol, TypeVar

import msgspec
from msgspec import Meta

from mlxdist.keys.pair import PublicKey
from mlxdist.protocol.errors import MismatchError, UserError, WireError
from mlxdist.protocol.limits import Port
from mlxdist.protocol.untrusted import NODE_NAME

VERSION = 1
MOST_BYTES = 1024  # of a message
FIRST_PORT = 7550  # control, where a run that other Macs may join has no port of its own choice; data is the next one
OFFSET = 2  # from the control port to the one at which keys are exchanged
KIND = "_mlxdist._tcp"  # under which Bonjour announces a run that other Macs may join, …
SHOWN_DIGITS = 16  # … with so many digits of its public key
LENGTH_BYTES = 2  # before each message on a connection
DIGITS = 4  # of each of the two groups of a code
JOINER, COORDINATOR = b"mlxdist joiner", b"mlxdist coordinator"  # the two identities of SPAKE2, and of the proofs

Element = Annotated[bytes, Meta(min_length=33, max_length=33)]
Mac = Annotated[bytes, Meta(min_length=32, max_length=32)]
NodeName = Annotated[str, Meta(pattern=rf"^{NODE_NAME.pattern}\Z")]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, tag_field="type"):
    """The base of the messages of the exchange."""


class Hello(Message, frozen=True):
    """A Mac that wants to join."""

    version: Annotated[int, Meta(ge=0, lt=2**31)]
    name: NodeName
    public: PublicKey
    element: Element


class Answer(Message, frozen=True):
    """The coordinator, and the control port of its run."""

    public: PublicKey
    port: Port
    element: Element


class Proof(Message, frozen=True):
    """The joiner knows the code."""

    mac: Mac


class Granted(Message, frozen=True):
    """The coordinator knows the code as well, and has noted the joiner under this name."""

    name: NodeName
    mac: Mac


class Refused(Message, frozen=True):
    """The exchange has ended, for a reason. Not proven: it may come from anyone."""

    reason: Annotated[str, Meta(max_length=500)]


AnyMessage = Hello | Answer | Proof | Granted | Refused
WRONG = "the codes differ, or someone between the two Macs has changed a message"
M = TypeVar("M", bound=Message)


class _Spake(Protocol):
    def start(self) -> bytes: ...

    def finish(self, inbound: bytes) -> bytes: ...


def new_code() -> str:
    """Returns a random code of two groups of digits, as 4831-0927."""
    digits = f"{secrets.randbelow(10 ** (2 * DIGITS)):0{2 * DIGITS}}"
    return f"{digits[:DIGITS]}-{digits[DIGITS:]}"


def code_of(text: str) -> str:
    """Returns the code that a person has typed, with or without a dash or spaces. Raises UserError for another text."""
    digits = "".join(one for one in text if one not in " -\t\r\n")
    if len(digits) != 2 * DIGITS or not (digits.isascii() and digits.isdigit()):
        raise UserError("a code has two groups of four digits, as 4831-0927: the Mac that launches shows it")
    return f"{digits[:DIGITS]}-{digits[DIGITS:]}"


def packed(message: Message) -> bytes:
    """Returns the bytes of a message."""
    return msgspec.msgpack.encode(message)


def framed(message: bytes) -> bytes:
    """Returns a message as it stands on a connection: its length, then its bytes."""
    return len(message).to_bytes(LENGTH_BYTES, "big") + message


def length_of(head: bytes) -> int:
    """Returns the length of the message that follows. Raises WireError for one that no message of ours has."""
    length = int.from_bytes(head, "big")
    if not 0 < length <= MOST_BYTES:
        raise WireError("these bytes are no message of the exchange of keys")
    return length


def unpacked(data: bytes, *kinds: type[M]) -> M:
    """Returns a message of one of these kinds.

    Raises MismatchError with the reason of a Refused that is not expected, WireError for anything else.
    """
    try:
        message = msgspec.msgpack.decode(data, type=AnyMessage)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise WireError("these bytes are no message of the exchange of keys") from None
    if isinstance(message, kinds):
        return message
    if isinstance(message, Refused):
        raise MismatchError(message.reason)
    raise WireError(f"{type(message).__name__} is not due at this point of the exchange of keys")


def asked(hello: bytes) -> Hello:
    """Returns a joiner's first message. Raises MismatchError for another version, WireError for another message."""
    message = unpacked(hello, Hello)
    if message.version != VERSION:
        raise MismatchError("the two Macs have different versions of mlxdist: install the same one on both")
    return message


def _secret(side: _Spake, theirs: bytes) -> bytes:
    """Returns the common key, 32 bytes. Raises WireError for an element that is none, or the own one sent back."""
    from spake2 import SPAKEError

    try:
        return side.finish(theirs)
    except (SPAKEError, ValueError, AssertionError):  # its point is not on the curve, or not of the large group
        raise WireError("an element of the exchange of keys is none") from None


def _mac(secret: bytes, whose: bytes, *parts: bytes) -> bytes:
    """Returns the proof of one side over all that was said; each part is preceded by its length."""
    text = b"".join(len(part).to_bytes(4, "big") + part for part in (whose, *parts))
    return hmac.digest(secret, text, "sha256")


class JoinersSide:
    """One exchange as the joiner makes it: `hello`, then `proof`, then `name`."""

    def __init__(self, code: str, name: str, public: str) -> None:
        """`code` as `code_of` returns it; `public`: the key of this Mac, which asks to be called `name`."""
        from spake2 import SPAKE2_A

        self._spake: _Spake = SPAKE2_A(code.encode(), idA=JOINER, idB=COORDINATOR)
        self.hello = packed(Hello(VERSION, name, public, self._spake.start()))

    def proof(self, answer: bytes) -> bytes:
        """Returns the proof. Raises MismatchError where the coordinator refuses, WireError for another message."""
        self.answer = unpacked(answer, Answer)
        self._secret = _secret(self._spake, self.answer.element)
        self._said = (self.hello, answer)
        return packed(Proof(_mac(self._secret, JOINER, *self._said)))

    def name(self, granted: bytes) -> str:
        """Returns the name of this Mac at the coordinator, whose key is now proven to be that of `answer`.

        Raises MismatchError where the coordinator refuses, or does not know the code; WireError for another message.
        """
        message = unpacked(granted, Granted)
        if not hmac.compare_digest(message.mac, _mac(self._secret, COORDINATOR, *self._said, message.name.encode())):
            raise MismatchError(WRONG)
        return message.name


class CoordinatorsSide:
    """One exchange as the coordinator makes it: `answer`, then `check`, then `granted`."""

    def __init__(self, code: str, public: str, port: int, hello: bytes) -> None:
        """`public`: the key of a run; `port`: its control port; `hello`: the joiner's first message.

        Raises MismatchError for another version, WireError for another message.
        """
        from spake2 import SPAKE2_B

        self.hello = asked(hello)
        spake: _Spake = SPAKE2_B(code.encode(), idA=JOINER, idB=COORDINATOR)
        self.answer = packed(Answer(public, port, spake.start()))
        self._secret = _secret(spake, self.hello.element)
        self._said = (hello, self.answer)

    def check(self, proof: bytes) -> None:
        """Raises MismatchError for the proof of one who does not know the code, WireError for another message."""
        if not hmac.compare_digest(unpacked(proof, Proof).mac, _mac(self._secret, JOINER, *self._said)):
            raise MismatchError(WRONG)

    def granted(self, name: str) -> bytes:
        """Returns the last message, for a joiner whose proof was right: it is called `name` from now on."""
        return packed(Granted(name, _mac(self._secret, COORDINATOR, *self._said, name.encode())))
