"""Thousands of random histories of a cluster: nodes join, end, sleep, lie or come back, and no number changes.

The world of tests/simulation/sim_world.py looks at the laws after every move; here is what may happen to it.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.cases import slow_but
from tests.simulation.planted_cluster_bugs import BUGS
from tests.simulation.sim_events import COMMON, EVENTS
from tests.simulation.sim_nodes import MOST_LEAVES
from tests.simulation.sim_world import World

SEED = st.integers(0, 2**16)
NAMES = ("a", "b", "c", "d")


class Histories(RuleBasedStateMachine):
    """A step is in work, or about to be, and things happen. One step is done before anything does: speeds are known."""

    world: World
    broken = False  # a law was seen broken: what follows of it is not to hide it

    @contextmanager
    def _seen(self) -> Iterator[None]:
        self.broken = True
        yield
        self.broken = False

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
        with self._seen():
            self.world.begin_step(4)
            self.world.settle()
            self.world.begin_step(leaves)

    @rule(moves=st.integers(1, 60), seed=SEED)
    def things_go_on(self, moves: int, seed: int) -> None:
        with self._seen():
            self.world.flow(moves, seed)

    @rule(seconds=st.sampled_from([1.0, 1.0, 3.0, 7.0, 16.0]))
    def time_passes(self, seconds: float) -> None:
        with self._seen():
            self.world.time(seconds)

    @precondition(lambda self: not self.world.in_step and not self.world.over)
    @rule(leaves=st.integers(1, MOST_LEAVES))
    def the_next_step_begins(self, leaves: int) -> None:
        with self._seen():
            self.world.begin_step(leaves)

    @precondition(lambda self: not self.world.over)
    @rule(what=st.sampled_from(sorted(EVENTS)), which=st.integers(0, 2**10), moves=st.integers(0, 20))
    def goes_wrong(self, what: str, which: int, moves: int) -> None:
        with self._seen():
            self.world.disturbances += 1
            EVENTS[what](self.world, which)
            self.world.flow(moves, which)

    @precondition(lambda self: not self.world.over)
    @rule(what=st.sampled_from(sorted(COMMON)), which=st.integers(0, 2**10), moves=st.integers(0, 20))
    def goes_wrong_as_it_often_does(self, what: str, which: int, moves: int) -> None:
        self.goes_wrong(what, which, moves)

    def teardown(self) -> None:
        """All is well again: the step ends, everybody works again, and another step is as if nothing had been."""
        if not hasattr(self, "world"):
            return
        with closing(self.world) as world:
            if self.broken:
                return
            world.look()
            world.settle()
            if not world.over:
                world.begin_step(MOST_LEAVES)
                world.settle()
                assert not world.over or world.launched


QUICK = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
# Without shrinking, which would take minutes and shows nothing that a planted bug does not say itself.
SEARCH = settings(
    QUICK, max_examples=1000, phases=(Phase.generate,), derandomize=True, database=None, report_multiple_bugs=False
)
SOON = ("both of a race count", "damage is not seen", "lost leaves are forgotten", "summed buffers are kept")


def test_no_history_changes_a_number_or_hangs() -> None:
    run_state_machine_as_test(Histories, settings=QUICK)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_thousands_of_long_histories_change_no_number_and_do_not_hang() -> None:
    run_state_machine_as_test(Histories, settings=settings(QUICK, max_examples=2000, stateful_step_count=40))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", slow_but(SOON, BUGS))
def test_the_machine_finds_a_planted_bug(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name].plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError, KeyError), match=BUGS[name].seen):
        run_state_machine_as_test(Histories, settings=SEARCH)
