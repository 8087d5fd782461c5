"""Who takes part: admission, beats, silence, loss. The control connection's half of the cluster; no socket, no clock.

    Enlist -> Admit      Beat -> Noted      silence -> suspect -> dead      a worker's end -> its work to others

A node has one supervisor and one worker at a time. Every worker gets a life (session) of its own, so that nothing of
its predecessor counts. Times are monotonic seconds that the caller gives.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mlxdist.coordinator.hosts import NAME
from mlxdist.coordinator.roster import Node
from mlxdist.coordinator.rules import NodeNews, Rules
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import MlxdistError, NodeError, WireError
from mlxdist.protocol.numerics import WORKER_ENVIRONMENT
from mlxdist.protocol.states import NodeEvent, NodeState
from mlxdist.protocol.transport import CONTROL, DATA
from mlxdist.protocol.wire import Buffer

SILENT_BEATS = 1.5  # beats without a word after which the connection is tried
RIVAL_BEATS = 2  # of the first supervisor, after which a second one of its name is refused
EARLY_EXITS = 3  # workers in a row that ended before they were ready: the node is given up

Send = Callable[..., None]  # (channel, peer, message, payload = b"")


@dataclass
class Membership:
    """The nodes by name. `on_lost(node, blame)` gives away what its worker had; returns what to say of that."""

    rules: Rules
    send: Callable[[str, bytes, m.Message, Buffer], None]
    on_lost: Callable[[Node, bool], str]
    busy: Callable[[Node], bool]
    nodes: dict[str, Node] = field(default_factory=dict)
    news: deque[NodeNews] = field(default_factory=deque)
    given_up: dict[str, MlxdistError] = field(default_factory=dict)
    over: bool = False
    _sessions: int = 0

    def ready(self) -> list[Node]:
        """The nodes that can work, in the order of their names."""
        return [node for _, node in sorted(self.nodes.items()) if node.works]

    def by_life(self, life: object) -> Node | None:
        """The node that a message belongs to, if it still takes part."""
        return next((node for node in self.nodes.values() if node.life == life and not node.gone), None)

    def tell(self, node: Node, sentence: str) -> None:
        """News of a node."""
        self.news.append(NodeNews(node.name, node.state.value, sentence))

    # ---- coming

    def enlist(self, message: m.Enlist, peer: bytes, now: float) -> None:
        """A supervisor asks: admit it, refuse it, or let it ask again while an earlier one of its name is tried."""
        if self.over:
            return
        if reason := self._unfit(message):
            self._control(peer, m.Refuse(reason))
            return
        known = self.nodes.get(message.name)
        if known is not None and not known.gone and known.control != peer:
            if not self._replaces(known, message, now):
                return
            known = None
        if known is None or known.gone:
            before, known = known, Node(message.name, self._new_life(), peer, now, host=message.host, progressed=now)
            if before is not None:
                known.tokens_per_second, known.early_exits = before.tokens_per_second, before.early_exits
            self.nodes[message.name] = known
            self.given_up.pop(message.name, None)
            self.tell(known, "connected")
        elif known.spent:
            known.life, known.spent = self._new_life(), False
        known.heard(now)
        rules = self.rules
        admit = m.Admit(known.life, rules.data_port, rules.beat_seconds, WORKER_ENVIRONMENT, rules.restart_seconds)
        self._control(peer, admit)

    def _unfit(self, message: m.Enlist) -> str:
        if message.protocol != m.PROTOCOL_VERSION:
            mine = f"{message.name} speaks protocol {message.protocol}, the coordinator {m.PROTOCOL_VERSION}"
            return f"{mine}: install the same mlxdist on both"
        if not NAME.fullmatch(message.name):  # it names a log file
            allowed = "letters, digits, points, dashes, underscores"
            return f"a node cannot be named {message.name[:80]!r}: --name takes {allowed}"
        return ""

    def _replaces(self, known: Node, message: m.Enlist, now: float) -> bool:
        """Whether a second supervisor takes the place of the first: when that one does not beat any more."""
        if known.rival is None:
            known.rival, known.beats_since_rival = now, 0
            self._control(known.control, m.Noted(known.life, -1))  # finds out whether the connection is there
        other_host = message.host.get("host") != known.host.get("host")
        if other_host or known.beats_since_rival >= RIVAL_BEATS:
            known.rival = None
            reason = f"a node named {message.name!r} takes part already; give this one another name"
            self._refuse_newcomer(message, reason)
            return False
        if known.closed is None and now - known.last_beat <= SILENT_BEATS * self.rules.beat_seconds:
            return False
        self.lose(known, NodeEvent.LOST, "its supervisor was started anew")
        return True

    def _refuse_newcomer(self, message: m.Enlist, reason: str) -> None:
        self._control(self._asking, m.Refuse(reason))

    _asking: bytes = b""

    def _new_life(self) -> m.Life:
        self._sessions += 1
        return m.Life(self.rules.run, self.rules.incarnation, self._sessions)
