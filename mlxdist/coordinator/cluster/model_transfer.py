"""The run's model on its way to nodes that have no copy: block by block, as they ask. No file is read here.

    ModelWanted -> ListFiles -> ModelFiles      BlockWanted -> ReadBlock -> FileBlock -> BlockTaken

The fleet reads what `due` returns, and brings it to `answered`. A node has at most WINDOW blocks that it has
asked for and not read, so one that does not read costs the coordinator no more memory than that. While vectors travel,
the blocks of files take at most one part in REST of the time, so that the others' step hardly notices.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from secrets import token_hex

from mlxdist.coordinator.cluster.events import Event, NodeNews, news_of, to_worker
from mlxdist.coordinator.cluster.node import Node
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import StaleError, WireError
from mlxdist.protocol.model_files import WINDOW, block_count, size_phrase
from mlxdist.protocol.states import NodeEvent, NodeState
from mlxdist.protocol.vectors import BLOCK_BYTES

REST = 40.0  # times the seconds of a block, before the next one goes while vectors travel
AHEAD_SECONDS = 0.05  # that the blocks under way to one node may take: a vector waits no longer behind them

NOT_THERE = "the model is not there"


@dataclass(frozen=True)
class ListFiles:
    """A wish to know the model's files, with their hashes."""


@dataclass(frozen=True)
class ReadBlock:
    """A wish to have a block of one of the model's files read for a node's worker."""

    name: str
    session: m.SessionId
    file: int
    block: int


@dataclass(frozen=True)
class Listed:
    """The files of the model with their hashes. None: there is no whole copy here."""

    files: tuple[m.ModelFile, ...]


@dataclass(frozen=True)
class BlockRead:
    """A block as it was asked for, and the SHA-256 of its bytes."""

    asked: ReadBlock
    payload: bytes
    digest: str


@dataclass(frozen=True)
class Unreadable:
    """The reason for which the files cannot be read, or not any more."""

    reason: str


Reading = ListFiles | ReadBlock
Answer = Listed | BlockRead | Unreadable


@dataclass
class _Reader:
    """The requests of one session's worker."""

    session: m.SessionId
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # (file, block)
    being_read: int = 0  # blocks, at the coordinator's disk
    unread: dict[str, float] = field(default_factory=dict)  # when a block was sent, by its receipt
    short: set[str] = field(default_factory=set)  # receipts of blocks that measure nothing: the last ones of files
    seconds: float = 0.0  # of a block on its way, the last time
    receipted: float = 0.0  # when the last receipt came
    furthest: tuple[int, int] = (-1, -1)

    @property
    def under_way(self) -> int:
        """Blocks that may be in memory here."""
        return self.being_read + len(self.unread)

    def most(self) -> int:
        """Returns the number of blocks that may be under way while no vector travels."""
        return max(1, min(WINDOW, int(AHEAD_SECONDS / self.seconds))) if self.seconds else 1


@dataclass
class ModelTransfer:
    """The model's files, once they are listed, and the nodes that get them. `shared`: the coordinator has a copy."""

    shared: bool = False
    files: tuple[m.ModelFile, ...] | None = None
    draw: Callable[[], str] = lambda: token_hex(16)
    _readers: dict[str, _Reader] = field(default_factory=dict)  # by node; in the order of their last block
    _listing: bool = False
    _rest_until: float = 0.0

    # ---- what nodes say

    def can_send(self, node: Node) -> bool:
        """Returns True if a node can be sent the files, and was not told them in this session."""
        return self.shared and self.files != () and not node.worker.wanted_model

    def wanted(self, node: Node, why: str = NOT_THERE) -> list[Event]:
        """Notes that a worker's host has no copy, or another one. It is told the files as soon as they are listed."""
        if node.worker.wanted_model:
            raise WireError("it asked for the model twice")
        node.move(NodeEvent.MODEL_WANTED)
        node.worker.wanted_model = True
        self._readers[node.name] = _Reader(node.session)
        if self.files is None and self.shared:
            return [news_of(node, why, "its files are hashed here, to send them")]
        return self._told(node, self.files or (), why)

    def block_wanted(self, node: Node, message: m.BlockWanted) -> list[Event]:
        """Takes a request for a block.

        Raises WireError for one that is none, or one too many; StaleError when the files cannot be read any more.
        """
        reader = self._readers.get(node.name)
        if reader is None or self.files is None:
            raise WireError("a block of a model whose files it was not told")
        if not self.files:
            raise StaleError("the model's files cannot be read any more")
        if not 0 <= message.file < len(self.files):
            raise WireError(f"block {message.block} of file {message.file}, of {len(self.files)} files")
        if not 0 <= message.block < block_count(self.files[message.file].size):
            raise WireError(f"block {message.block} of {self.files[message.file].name}, which has no such block")
        if reader.under_way + len(reader.waiting) >= WINDOW:
            raise WireError(f"more than {WINDOW} blocks asked for and not read")
        reader.waiting.append((message.file, message.block))
        reader.furthest = max(reader.furthest, (message.file, message.block))
        return []

    def block_taken(self, node: Node, message: m.BlockTaken, now: float) -> list[Event]:
        """Takes the receipt of a block. Raises WireError for one that was not given to this node."""
        reader = self._readers.get(node.name)
        sent = reader.unread.pop(message.receipt, None) if reader is not None else None
        if reader is None or sent is None:
            raise WireError("the receipt of a block that it was not sent")
        if message.receipt in reader.short:
            reader.short.discard(message.receipt)
        else:
            reader.seconds = now - max(sent, reader.receipted)
        reader.receipted = now
        return []

    def is_new(self, name: str, message: m.BlockWanted) -> bool:
        """True if the request is for a block behind all that the node has asked for."""
        reader = self._readers.get(name)
        return reader is not None and (message.file, message.block) > reader.furthest

    def here(self, node: Node) -> list[Event]:
        """Takes a worker's word that it needs no more, and loads the model."""
        node.move(NodeEvent.MODEL_HERE)
        self.drop(node.name)
        return [news_of(node, "the model is there", "it is loaded")] if self.files else []

    def drop(self, name: str) -> None:
        """Forgets what a node has asked for whose worker is gone."""
        self._readers.pop(name, None)

    def slept(self, now: float) -> None:
        """Notes that the coordinator did nothing until now: what is under way measures nothing."""
        for reader in self._readers.values():
            reader.unread = dict.fromkeys(reader.unread, now)

    @property
    def idle(self) -> bool:
        """True when no node waits for anything."""
        return not self._readers

    def under_way(self, name: str) -> bool:
        """True while a block travels to this node, or waits for it."""
        reader = self._readers.get(name)
        return reader is not None and bool(reader.waiting or reader.under_way)

    def waits_for_list(self, node: Node) -> bool:
        """Returns True while a node can do nothing but wait until the files are listed here."""
        return node.state is NodeState.FETCHING and self.files is None

    # ---- what the disk is asked, and says

    def due(self, now: float, *, quiet: bool) -> list[Reading]:
        """Returns what is to be read now, each once. `quiet`: no vector travels."""
        found: list[Reading] = []
        if self.shared and self.files is None and self._readers and not self._listing:
            self._listing = True
            found.append(ListFiles())
        for name, reader in list(self._readers.items()):
            while reader.waiting and reader.under_way < reader.most():
                if not quiet and (now < self._rest_until or reader.under_way):
                    break
                self._rest_until = now + REST * reader.seconds
                reader.being_read += 1
                found.append(ReadBlock(name, reader.session, *reader.waiting.popleft()))
                self._readers[name] = self._readers.pop(name)  # the others are first the next time
        return found

    def answered(self, answer: Answer, nodes: Mapping[str, Node], now: float) -> list[Event]:
        """Takes what the disk has said, for the nodes that wait for it."""
        match answer:
            case BlockRead(asked=asked):
                reader = self._readers.get(asked.name)
                if reader is None or reader.session != asked.session:
                    return []  # its worker is gone, or has it from elsewhere
                receipt = self.draw()
                reader.being_read -= 1
                reader.unread[receipt] = now
                if len(answer.payload) < BLOCK_BYTES:
                    reader.short.add(receipt)
                block = m.FileBlock(asked.session, asked.file, asked.block, receipt, answer.digest)
                return [to_worker(nodes[asked.name], block, answer.payload)]
            case Listed(files=files):
                self.files, told = files, list[Event]()
            case Unreadable(reason=reason):
                self.files, told = (), [NodeNews("coordinator", "", f"the model cannot be sent: {reason}", log=True)]
        for name, reader in self._readers.items():
            reader.waiting.clear()
            told += self._told(nodes[name], self.files)
        return told

    def _told(self, node: Node, files: tuple[m.ModelFile, ...], why: str = NOT_THERE) -> list[Event]:
        size = sum(file.size for file in files)
        action = f"it gets {size_phrase(size)} from here" if files else "and not here: it looks at the hub"
        return [to_worker(node, m.ModelFiles(node.session, files)), news_of(node, why, action)]
