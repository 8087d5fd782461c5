"""A worker's data connection, watched by messages of our own. No socket, no clock.

    silent for a heartbeat's time -> Ping -> Pong      silent for longer -> a new session over a new connection

Everything that arrives is a sign of life, blocks too. On a slow link one block may take longer than the limit, so the
limit grows with the waits that were seen while vectors travelled, and doubles when a connection was given up meanwhile.
"""

from mlxdist.coordinator.cluster.events import Event, news_of, to_worker
from mlxdist.coordinator.cluster.membership import Membership
from mlxdist.coordinator.cluster.node import Node
from mlxdist.protocol import messages as m
from mlxdist.protocol.states import NodeState


def watch_data(members: Membership, node: Node, now: float, *, carrying: bool, patience: float) -> list[Event]:
    """Looks at a node's data connection. `carrying`: vectors are under way on it.

    A connection that is closed or silent is replaced, and the worker keeps its model. One that takes up the new session
    not within `patience` seconds does nothing at all, and is started again. While the heartbeats are silent too, they
    alone decide: then the node is lost, not its connection.
    """
    timing, worker = members.settings.timing, node.worker
    if node.gone or worker.ended:
        return []
    if worker.data is None:
        return _without_hello(members, node, now)
    closed = worker.data_closed is not None and now - worker.data_closed > timing.return_seconds
    if closed and not members.silent(node, now):
        why = f"its data connection stayed closed for {timing.return_seconds:.3g} s"
        return members.start_again(node, why, now)
    if worker.asked is None:
        if now - worker.heard < timing.beat_seconds:
            return []
        worker.asked = now
        return [to_worker(node, m.Ping(node.session))]
    limit = node.carrying_limit(timing.data_seconds) if carrying else timing.data_seconds
    if now - worker.asked <= limit or members.silent(node, now):
        return []
    node.silences += carrying
    why = f"its data connection gave no sign for {now - worker.heard:.3g} s, and its heartbeats come"
    return members.start_again(node, why, now, "its worker makes a new one, and keeps its model", patience)


def _without_hello(members: Membership, node: Node, now: float) -> list[Event]:
    """Looks at a worker that has said nothing yet: it starts, it does nothing, or its words are lost on the way."""
    timing, worker = members.settings.timing, node.worker
    waited = now - worker.progressed
    serving = worker.serving
    limit = timing.start_timeout if serving is not None or worker.patience is None else worker.patience
    if node.state is not NodeState.CONNECTING or not worker.pid:
        return []
    if waited > limit:
        return members.restart_worker(node, f"its worker did not say hello for {limit:.3g} s")
    if serving is not None and not worker.told and now - serving > timing.data_seconds:
        worker.told = True
        port = members.settings.data_port
        return [news_of(node, f"its worker is there, and cannot reach the data port {port}: is a firewall between?")]
    return []
