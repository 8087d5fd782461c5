"""Thousands of random histories of a cluster: whoever joins, dies, sleeps, lies or comes back, no number changes.

The world of tests/sim_world.py looks at the laws after every move; here is what may happen to it.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.sim_events import COMMON, EVENTS
from tests.sim_nodes import MOST_LEAVES
from tests.sim_world import World

SEED = st.integers(0, 2**16)
NAMES = ("a", "b", "c", "d")


class Histories(RuleBasedStateMachine):
    """A step is in work, or about to be, and things happen. One step is done before anything does: speeds are known."""

    world: World

    @initialize(
        nodes=st.integers(1, 4),
        min_nodes=st.sampled_from([1, 1, 2]),
        launched=st.sampled_from([False, False, True]),
        reference=st.booleans(),
        scored=st.booleans(),
        cuts=st.lists(st.integers(0, MOST_LEAVES), max_size=3),
        leaves=st.integers(1, MOST_LEAVES),
    )
    def begins(
        self,
        nodes: int,
        min_nodes: int,
        launched: bool,
        reference: bool,
        scored: bool,
        cuts: list[int],
        leaves: int,
    ) -> None:
        self.world = World(
            NAMES[:nodes],
            min_nodes=min(min_nodes, nodes),
            launched=launched,
            reference=reference,
            scored=scored,
            cuts=cuts,
        )
        self.world.begin_step(4)
        self.world.settle()
        self.world.begin_step(leaves)

    @rule(moves=st.integers(1, 60), seed=SEED)
    def things_go_on(self, moves: int, seed: int) -> None:
        self.world.flow(moves, seed)

    @rule(seconds=st.sampled_from([1.0, 1.0, 3.0, 7.0, 16.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.time(seconds)

    @precondition(lambda self: not self.world.in_step and not self.world.over)
    @rule(leaves=st.integers(1, MOST_LEAVES))
    def the_next_step_begins(self, leaves: int) -> None:
        self.world.begin_step(leaves)

    @precondition(lambda self: not self.world.over)
    @rule(what=st.sampled_from(sorted(EVENTS)), which=st.integers(0, 2**10), moves=st.integers(0, 20))
    def goes_wrong(self, what: str, which: int, moves: int) -> None:
        EVENTS[what](self.world, which)
        self.world.disturbances += 1
        self.world.flow(moves, which)

    @precondition(lambda self: not self.world.over)
    @rule(what=st.sampled_from(sorted(COMMON)), which=st.integers(0, 2**10), moves=st.integers(0, 20))
    def goes_wrong_as_it_often_does(self, what: str, which: int, moves: int) -> None:
        self.goes_wrong(what, which, moves)

    def teardown(self) -> None:
        """All is well again: the step ends, everybody works again, and another step is as if nothing had been."""
        if not hasattr(self, "world"):
            return
        self.world.look()
        self.world.settle()
        if not self.world.over:
            self.world.begin_step(MOST_LEAVES)
            self.world.settle()
            assert not self.world.over or self.world.launched


QUICK = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_no_history_changes_a_number_or_hangs() -> None:
    run_state_machine_as_test(Histories, settings=QUICK)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_long_history_changes_a_number_or_hangs() -> None:
    run_state_machine_as_test(Histories, settings=settings(QUICK, max_examples=2000, stateful_step_count=50))
