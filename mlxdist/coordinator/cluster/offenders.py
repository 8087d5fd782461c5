"""Peers that sent what cannot be accepted: counted, said once a minute, and not heard for a while after an error."""

from collections import OrderedDict
from dataclasses import dataclass, field

SILENT_SECONDS = 30.0  # after an error that a peer's message made here
MINUTE = 60.0
SPELL_SECONDS = 10.0
MOST_ANSWERS = 64  # to a stranger in a spell
MOST_ANSWERS_IN_ALL = 2048
MOST_LINES = 60  # on refused messages, in a minute
MOST_PEERS = 1024  # that are remembered; the oldest is forgotten first

Peer = tuple[str, bytes]  # its channel, and the transport's name of its connection


@dataclass
class Offenders:
    """The refused messages of a run. Its memory is bounded, whatever is sent."""

    refused: int = 0  # messages that were no message of ours
    errors: int = 0  # messages that made an error here
    first_error: Exception | None = None
    _until: OrderedDict[Peer, float] = field(default_factory=OrderedDict)
    _said: OrderedDict[Peer, float] = field(default_factory=OrderedDict)
    _answers: OrderedDict[Peer, float] = field(default_factory=OrderedDict)  # in this spell
    _spell: float = 0.0  # since when answers are counted
    _all: int = 0
    _minute: float = 0.0  # since when lines are counted
    _lines: int = 0

    def add(self, channel: str, peer: bytes, error: Exception, now: float) -> None:
        """Counts an error, and silences its peer."""
        self.errors += 1
        self.first_error = self.first_error or error
        _keep(self._until, (channel, peer), now + SILENT_SECONDS)

    def silenced(self, channel: str, peer: bytes, now: float) -> bool:
        """True if this peer is not heard now."""
        return self._until.get((channel, peer), now) > now

    def may_answer(self, channel: str, peer: bytes, now: float) -> bool:
        """Counts an answer to a stranger. False past a limit: one that does not read would fill our memory."""
        if now - self._spell > SPELL_SECONDS:
            self._spell, self._all = now, 0
            self._answers.clear()
        given = self._answers.get((channel, peer), 0) + 1
        self._all += 1
        _keep(self._answers, (channel, peer), given)
        return given <= MOST_ANSWERS and self._all <= MOST_ANSWERS_IN_ALL

    def refuse(self, channel: str, peer: bytes, now: float) -> bool:
        """Counts a refused message. True if a person is to be told: once a minute for each peer, 60 times in all."""
        self.refused += 1
        if now - self._minute >= MINUTE:
            self._minute, self._lines = now, 0
        if now - self._said.get((channel, peer), now - MINUTE) < MINUTE or self._lines >= MOST_LINES:
            return False
        self._lines += 1
        _keep(self._said, (channel, peer), now)
        return True


def _keep(table: OrderedDict[Peer, float], peer: Peer, value: float) -> None:
    table[peer] = value
    table.move_to_end(peer)
    while len(table) > MOST_PEERS:
        table.popitem(last=False)
