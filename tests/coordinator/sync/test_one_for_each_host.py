from mlxdist.coordinator.config.hosts import CoordinatorHost, Hosts, NodeSpec
from mlxdist.coordinator.launch.elsewhere import coordinator_node
from mlxdist.coordinator.launch.ssh import target_of
from mlxdist.coordinator.sync.sync import added


def test_several_nodes_in_one_work_folder_need_what_any_of_them_needs() -> None:
    first = NodeSpec(name="a", host="mini-1", python="/usr/bin/python3")
    (both,) = added([first, NodeSpec(name="b", host="mini-1", model="/models/own")])
    assert (both.python, both.model) == ("", "")
    (one,) = added([first, NodeSpec(name="b", host="mini-1", python="/opt/python", model="/models/own")])
    assert (bool(one.python), one.model) == (True, "")


def test_other_work_folders_and_users_count_on_their_own() -> None:
    nodes = [
        NodeSpec(name="a", host="mini-1"),
        NodeSpec(name="b", host="mini-1", workdir="/other"),
        NodeSpec(name="c", host="mini-1", user="ada"),
    ]
    assert [node.name for node in added(nodes)] == ["a", "b", "c"]


def test_the_host_of_a_coordinator_elsewhere_is_reached_as_its_node_or_as_the_first_one() -> None:
    nodes = (NodeSpec(name="a", host="mini-1", user="ada"), NodeSpec(name="b", host="mini-2", user="bea"))
    assert coordinator_node(Hosts(None, CoordinatorHost(host="mini-2"), nodes)) == nodes[1]
    other = coordinator_node(Hosts(None, CoordinatorHost(host="mini-9"), nodes))
    assert (target_of(other).name, other.name) == ("ada@mini-9", "coordinator")
    assert coordinator_node(Hosts(None, CoordinatorHost(host="mini-9"), ())).host == "mini-9"
