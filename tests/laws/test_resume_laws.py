"""--resume continues everything that a step depends on, and everything that is told: one law each, and planted bugs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.coordinator.training.adamw import FIRST, SECOND
from mlxdist.coordinator.training.resume import earlier_sessions
from mlxdist.coordinator.training.state import Best, State
from mlxdist.node.work.engine import Engine
from tests.laws.resume_runs import STEPS, Sessions

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    return [Engine(), Engine()]


Whole = Callable[[Sessions], tuple[State, list[dict[str, object]]]]


@pytest.fixture
def broken(model: Path, engines: list[Engine], tmp_path: Path) -> Sessions:
    """A run that the test interrupts."""
    return Sessions(model, engines, tmp_path / "broken")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The state and the events of the same run without an interrupt."""
    known: dict[int, tuple[State, list[dict[str, object]]]] = {}

    def of(sessions: Sessions) -> tuple[State, list[dict[str, object]]]:
        key = sessions.early_stop_evals
        if key not in known:
            unbroken = replace(sessions, folder=tmp_path_factory.mktemp("whole") / "run")
            known[key] = (unbroken.session(), unbroken.told())
        return known[key]

    return of


def same(one: State, other: State) -> bool:
    """True when two states are the same to the last bit, counters included."""
    assert one.moments.vectors.keys() == other.moments.vectors.keys()
    pairs = [(one.adapter, other.adapter)]
    pairs += [(vector, other.moments.vectors[name]) for name, vector in one.moments.vectors.items()]
    bits = all(left.tobytes() == right.tobytes() for left, right in pairs)
    values = [(state.step, state.best, state.eval_rows, state.elapsed_seconds) for state in (one, other)]
    return bits and values[0] == values[1]


@pytest.mark.parametrize("at", [1, 2, 5, STEPS - 1])
def test_a_run_that_goes_on_after_any_step_is_the_unbroken_one(at: int, broken: Sessions, whole: Whole) -> None:
    """Adapter, moments, schedule, cursor, dropout, best, metrics file; with another number of nodes."""
    expected, told = whole(broken)
    broken.session(interrupt="save", at=at)
    assert same(broken.session(nodes=2), expected)
    assert broken.told() == told


@pytest.mark.parametrize(("interrupt", "at"), [("evaluation", 4), ("report", 5), ("evaluation", STEPS)])
def test_an_interrupt_within_a_step_loses_neither_its_line_nor_its_evaluation(
    interrupt: str, at: int, broken: Sessions, whole: Whole
) -> None:
    expected, told = whole(broken)
    broken.session(interrupt=interrupt, at=at)
    earlier = earlier_sessions(RunFolder(broken.folder))
    assert earlier is not None
    assert earlier.state.step == at - 1
    assert same(broken.session(), expected)
    assert broken.told() == told


def test_a_run_that_had_stopped_early_takes_no_further_step(broken: Sessions, whole: Whole) -> None:
    broken.early_stop_evals = 1
    expected, told = whole(broken)
    assert expected.step < STEPS, "the run was to stop early"
    for _ in range(2):
        assert same(broken.session(), expected)
        assert broken.told() == told


def test_the_evaluations_without_a_better_one_are_counted_over_all_sessions(broken: Sessions, whole: Whole) -> None:
    broken.early_stop_evals = 2
    expected, told = whole(broken)
    assert expected.best.evals_since == 2, "the run was to stop early"
    for at in range(1, expected.step):
        broken.session(interrupt="save", at=at)
    assert same(broken.session(), expected)
    assert broken.told() == told


# ---- a run whose length is given in hours

HOURS = 20 / 3600  # of seconds that the clock of these tests counts


@pytest.mark.parametrize("saved", [0, 1, 5])
def test_steps_that_are_done_again_have_the_recorded_learning_rates_on_any_clock_and_any_number_of_nodes(
    saved: int, broken: Sessions
) -> None:
    broken.max_hours, broken.seed = HOURS, 1
    expected = broken.session(interrupt="kill", at=saved)
    told = broken.told()
    rates = [event["learning_rate"] for event in told if event["event"] == "train"]
    assert len(set(rates)) == len(rates) > saved + 3, "each step was to have a learning rate of its own"
    broken.seed = 2
    assert same(broken.session(nodes=2), expected)
    assert broken.told() == told


@pytest.mark.parametrize("at", [1, 4])
def test_hours_count_over_all_sessions_and_the_next_learning_rate_is_that_of_the_unbroken_run(
    at: int, broken: Sessions, tmp_path: Path
) -> None:
    broken.max_hours = HOURS
    unbroken = replace(broken, folder=tmp_path / "unbroken")
    expected = unbroken.session()
    assert HOURS * 3600 <= expected.elapsed_seconds < HOURS * 3600 + 2
    broken.session(interrupt="save", at=at)
    assert same(broken.session(nodes=2), expected)
    assert broken.told() == unbroken.told()


def test_a_run_whose_hours_are_over_takes_no_further_step_and_goes_on_with_more(broken: Sessions) -> None:
    broken.max_hours = HOURS
    ended, told = broken.session(), broken.told()
    assert same(broken.session(), ended)
    assert broken.told() == told
    broken.max_hours = 2 * HOURS
    assert broken.session().elapsed_seconds >= 2 * HOURS * 3600
    assert broken.told()[: len(told)] == told


def test_the_law_finds_hours_that_are_not_continued(broken: Sessions, tmp_path: Path) -> None:
    broken.max_hours = HOURS
    expected = replace(broken, folder=tmp_path / "unbroken").session()
    broken.session(interrupt="save", at=4)
    assert not same(broken.session(plant=lambda state: replace(state, elapsed_seconds=0.0)), expected)


def shifted(state: State) -> State:
    return replace(state, moments=replace(state.moments, step=state.step - 1))


def with_moment(name: str, value: float) -> Callable[[State], State]:
    """A state with one of AdamW's moments replaced by a number."""

    def change(state: State) -> State:
        vectors = {**state.moments.vectors, name: np.full_like(state.adapter, value)}
        return replace(state, moments=replace(state.moments, vectors=vectors))

    return change


PLANTED: dict[str, Callable[[State], State]] = {
    "the adapter is forgotten": lambda state: replace(state, adapter=state.adapter * np.float32(0)),
    "the first moment is forgotten": with_moment(FIRST, 0.0),
    "the second moment is forgotten": with_moment(SECOND, 1.0),
    "a step is taken twice": shifted,
    "the best evaluation is forgotten": lambda state: replace(state, best=Best()),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_the_law_finds_what_is_not_continued(bug: str, broken: Sessions, whole: Whole) -> None:
    expected, told = whole(broken)
    broken.session(interrupt="save", at=5)
    assert not same(broken.session(plant=PLANTED[bug]), expected) or broken.told() != told
