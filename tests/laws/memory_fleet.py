"""A fleet in one process: real sessions and engines behind the in-memory transport, and a supervisor of four lines."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from mlxdist.coordinator.cluster.audit import Audit
from mlxdist.coordinator.cluster.cluster import Cluster
from mlxdist.coordinator.cluster.events import NodeNews
from mlxdist.coordinator.cluster.settings import ClusterSettings
from mlxdist.coordinator.config.run_spec import run_spec
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.memory.node_memory import NodeMemory
from mlxdist.node.link.session import Session
from mlxdist.node.work.engine import Engine, versions
from mlxdist.protocol import messages as m
from mlxdist.protocol.leaves import Row
from mlxdist.protocol.transport import CONTROL, DATA, MemoryHub, MemoryLink
from mlxdist.protocol.wire import decode, encode

LEAF_SECONDS = 0.1  # what each leaf is said to have taken


@dataclass
class MemoryNode:
    """A node without processes: it registers by itself, then serves its session whenever the hub waits."""

    name: str
    hub: MemoryHub
    engine: Engine
    host: Mapping[str, str] = field(default_factory=dict)  # its description of its machine
    refusal: str = ""  # what it was refused with
    control: MemoryLink = field(init=False)
    data: MemoryLink | None = None
    session: Session | None = None
    heard: list[m.Message] = field(default_factory=list)  # on the data connection, from the first on

    def __post_init__(self) -> None:
        self.control = self.hub.connect(CONTROL, self.name.encode())
        self.control.send(encode(m.Register(m.PROTOCOL_VERSION, self.name, 0, dict(self.host))))

    def work(self) -> None:
        """Take what has arrived, do it, send what there is to send."""
        for frames in self.control.receive(0):
            message, _ = decode(frames)
            if isinstance(message, m.Reject):
                self.refusal = message.reason
            if isinstance(message, m.Accept):
                self.session = Session(self.name, message.session)
                self.data = self.hub.connect(DATA, self.name.encode())
                self.session.say(m.Hello(message.session, versions()))
        if self.session is None or self.data is None:
            return
        for frames in self.data.receive(0):
            message, payload = decode(frames)
            self.heard.append(message)
            self.session.handle(message, payload)
        while self.session.jobs:
            job = self.session.next_job()
            for result in self.engine.perform(job, self.session.id, lambda sentence: None):
                self.session.deliver(result)
            self.session.done()
        for message, payload in self.session.take_outgoing():
            if isinstance(message, m.LeafAnswer):  # so that no load of this machine moves the split
                message = msgspec.structs.replace(message, seconds=LEAF_SECONDS)
            self.data.send(encode(message, payload))


@dataclass
class MemoryNodes:
    """The nodes of a fleet; another one may join at any time."""

    hub: MemoryHub
    nodes: list[MemoryNode] = field(default_factory=list)

    def join(self, engine: Engine, host: Mapping[str, str] | None = None) -> MemoryNode:
        """A new node, which registers when the hub waits next; `host` is its description of its machine."""
        self.nodes.append(MemoryNode(f"node-{len(self.nodes)}", self.hub, engine, host or {}))
        return self.nodes[-1]

    def work(self) -> None:
        """Let every node do what it has to do."""
        for node in self.nodes:
            node.work()


@contextmanager
def memory_cluster(
    config: RunConfig,
    engines: Sequence[Engine],
    on_news: Callable[[NodeNews], None] = lambda news: None,
    *,
    memory: NodeMemory | None = None,
) -> Iterator[tuple[Fleet, MemoryNodes]]:
    """A fleet with one node per engine, and the nodes; an engine keeps its model from one fleet to the next.

    `memory` is what a node must hold; None: unknown.
    """
    hub = MemoryHub()
    nodes = MemoryNodes(hub)
    for engine in engines:
        nodes.join(engine)
    hub.run = nodes.work
    settings = ClusterSettings(
        run="test",
        incarnation=1,
        spec=run_spec(config),
        versions=versions(),
        data_port=0,
        memory=memory or NodeMemory(),
    )
    audit = Audit(config.train.audit, config.batch.seed)
    fleet = Fleet(Cluster(settings), hub, on_news=on_news, clock=lambda: 0.0, audit=audit, threaded=False)
    try:
        yield fleet, nodes
    finally:
        fleet.close("the test is over")


@contextmanager
def memory_fleet(config: RunConfig, engines: Sequence[Engine]) -> Iterator[Fleet]:
    """The fleet of `memory_cluster` alone."""
    with memory_cluster(config, engines) as (fleet, _):
        yield fleet


@dataclass(frozen=True)
class ListRows:
    """Rows of a list: what the order, the leaves and the loop need of data."""

    items: Sequence[Row]

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        return np.array([len(row.ids) for row in self.items], np.int32)

    @property
    def labels(self) -> None:
        return None

    def __len__(self) -> int:
        return len(self.items)

    def rows(self, index: int) -> tuple[Row, ...]:
        return (self.items[index],)

    def where(self, index: int) -> str:
        return f"list:{index + 1}"


def make_row(row_id: int, ids: Sequence[int], prompt_len: int) -> Row:
    """A row whose targets are the tokens after the prompt."""
    targets = np.array([int(i >= max(prompt_len, 1)) for i in range(len(ids))], np.uint8)
    return Row(row_id, np.array(ids, np.int32), targets)
