"""Things that may go wrong in a world. Each event takes the world, and a number that says where it happens."""

from collections.abc import Callable
from typing import TypeVar

from tests.memory_nodes import Wire
from tests.simulation.sim_nodes import BARE, LIES, MOST_LEAVES, ODD
from tests.simulation.sim_world import World

T = TypeVar("T")
HOURS = 3600.0


def _one(found: list[T], which: int) -> list[T]:
    """One of them, or none where there is none."""
    return [found[which % len(found)]] if found else []


def _wires(world: World) -> list[Wire]:
    return [wire for one in world.supervisors for wire in world.wires_of(one)]


def a_worker_is_killed(world: World, which: int) -> None:
    for worker in _one(world.workers(), which):
        world.kill_worker(worker, which)


def a_worker_is_killed_at_its_next_leaf(world: World, which: int) -> None:
    for worker in _one(world.workers(), which):
        worker.doomed = True


def a_supervisor_is_killed(world: World, which: int) -> None:
    for node in _one(world.supervisors, which):
        world.kill_supervisor(node, which)


def a_supervisor_is_killed_and_started_again(world: World, which: int) -> None:
    for node in _one(world.supervisors, which):
        world.kill_supervisor(node, which)
        world.start(node.name)


def a_second_supervisor_of_a_name_is_started(world: World, which: int) -> None:
    if len(world.supervisors) < 6:
        for node in _one(world.supervisors, which):
            world.start(node.name)


def a_node_joins(world: World, which: int) -> None:
    if len(world.supervisors) < 6:
        world.start(f"late-{world.new_pid()}")


def a_node_leaves(world: World, which: int) -> None:
    for node in _one(world.supervisors, which):
        node.leave("told to")


def a_worker_stops(world: World, which: int) -> None:
    for worker in _one(world.workers(), which):
        worker.stopped = True


def a_node_stops(world: World, which: int) -> None:
    for node in _one(world.supervisors, which):
        node.stopped = True
        if node.worker is not None:
            node.worker.stopped = True


def all_go_on(world: World, which: int) -> None:
    for node in world.supervisors:
        node.stopped = False
        if node.worker is not None:
            node.worker.stopped = False


def a_node_gets_slow(world: World, which: int) -> None:
    for worker in _one(world.workers(), which):
        worker.slow = True


def a_slow_node_stops_until_others_have_its_work_and_goes_on(world: World, which: int) -> None:
    for worker in _one([one for one in world.workers() if one.results is not None], which):
        worker.stopped = True
        world.flow(80, which)
        world.time(4.0)
        world.flow(80, which)
        worker.stopped = False


def the_next_leaf_of_a_node_is_nan(world: World, which: int) -> None:
    for worker in _one(world.workers(), which):
        worker.bad = True


def a_worker_gives_a_wrong_answer(world: World, which: int) -> None:
    for worker in _one(world.workers(), which):
        worker.lie = LIES[which // 7 % len(LIES)]


def a_node_of_another_class_joins(world: World, which: int) -> None:
    if len(world.supervisors) < 6:
        world.start(f"{ODD}{world.new_pid()}")


def a_node_without_the_model_joins(world: World, which: int) -> None:
    if len(world.supervisors) < 6:
        world.start(f"{BARE}{world.new_pid()}")


def a_wire_is_cut_upwards(world: World, which: int) -> None:
    for wire in _one(_wires(world), which):
        wire.cut_up = True


def a_wire_is_cut_downwards(world: World, which: int) -> None:
    for wire in _one(_wires(world), which):
        wire.cut_down = True


def a_wire_is_cut(world: World, which: int) -> None:
    for wire in _one(_wires(world), which):
        wire.cut_up = wire.cut_down = True


def a_connection_breaks(world: World, which: int) -> None:
    for wire in _one(_wires(world), which):
        world.break_wire(wire, back=False)


def a_connection_flaps(world: World, which: int) -> None:
    for wire in _one(_wires(world), which):
        world.break_wire(wire, back=True)


def the_network_is_restored(world: World, which: int) -> None:
    world.restore_connections()


def a_partial_is_damaged(world: World, which: int) -> None:
    world.damage_up += 1


def an_adapter_is_damaged(world: World, which: int) -> None:
    world.damage_down += 1


def a_leaf_kills_every_worker(world: World, which: int) -> None:
    world.curses[which % MOST_LEAVES] = "crash"


def a_leaf_is_nan_everywhere(world: World, which: int) -> None:
    world.curses[which % MOST_LEAVES] = "nan"


def the_coordinator_sleeps(world: World, which: int) -> None:
    world.sleep((10.0, 60.0, 8 * HOURS)[which % 3])


def a_nodes_clock_jumps(world: World, which: int) -> None:
    for node in _one(world.supervisors, which):
        node.ahead += 8 * HOURS


def the_coordinator_is_killed_and_resumes(world: World, which: int) -> None:
    world.restart_coordinator()


def something_old_arrives(world: World, which: int) -> None:
    world.say_again(which, stranger=False)


def a_stranger_says_what_a_node_said(world: World, which: int) -> None:
    world.say_again(which, stranger=True)


Event = Callable[[World, int], None]
ALL: tuple[Event, ...] = (
    a_worker_is_killed,
    a_worker_is_killed_at_its_next_leaf,
    a_supervisor_is_killed,
    a_supervisor_is_killed_and_started_again,
    a_second_supervisor_of_a_name_is_started,
    a_node_joins,
    a_node_leaves,
    a_worker_stops,
    a_node_stops,
    all_go_on,
    a_node_gets_slow,
    a_slow_node_stops_until_others_have_its_work_and_goes_on,
    the_next_leaf_of_a_node_is_nan,
    a_worker_gives_a_wrong_answer,
    a_node_of_another_class_joins,
    a_node_without_the_model_joins,
    a_wire_is_cut_upwards,
    a_wire_is_cut_downwards,
    a_wire_is_cut,
    a_connection_breaks,
    a_connection_flaps,
    the_network_is_restored,
    a_partial_is_damaged,
    an_adapter_is_damaged,
    a_leaf_kills_every_worker,
    a_leaf_is_nan_everywhere,
    the_coordinator_sleeps,
    a_nodes_clock_jumps,
    the_coordinator_is_killed_and_resumes,
    something_old_arrives,
    a_stranger_says_what_a_node_said,
)
OFTEN: tuple[Event, ...] = (
    a_worker_is_killed,
    a_worker_is_killed_at_its_next_leaf,
    a_slow_node_stops_until_others_have_its_work_and_goes_on,
    the_next_leaf_of_a_node_is_nan,
    a_worker_gives_a_wrong_answer,
    a_partial_is_damaged,
    an_adapter_is_damaged,
    a_node_joins,
    a_node_of_another_class_joins,
    a_node_without_the_model_joins,
    a_node_stops,
    all_go_on,
    the_network_is_restored,
    the_coordinator_is_killed_and_resumes,
    something_old_arrives,
)
EVENTS: dict[str, Event] = {event.__name__.replace("_", " "): event for event in ALL}
COMMON: dict[str, Event] = {event.__name__.replace("_", " "): event for event in OFTEN}
