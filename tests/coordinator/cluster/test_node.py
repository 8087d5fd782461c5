"""A node of the roster moves as its table says."""

import pytest

from mlxdist.coordinator.cluster.node import Control, Node
from mlxdist.protocol.messages import SessionId
from mlxdist.protocol.states import NodeEvent, NodeState


def node_of(name: str) -> Node:
    return Node(name, SessionId("run", 1, "1"), Control(b"peer", 0.0))


def test_a_node_works_when_it_is_ready_or_busy_and_moves_only_as_the_table_says() -> None:
    node = node_of("a")
    for event, works in (
        (NodeEvent.WORKER_HELLO, False),
        (NodeEvent.CANARY_ANSWERED, True),
        (NodeEvent.ASSIGNED, True),
        (NodeEvent.SILENT, False),
    ):
        node.move(event)
        assert node.works is works
    with pytest.raises(ValueError, match="cannot happen"):
        node.move(NodeEvent.ASSIGNED)
    assert node.state is NodeState.SUSPECT
