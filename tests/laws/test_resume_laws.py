"""--resume continues everything that a step depends on, and everything that is told: one law each, and planted bugs."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from mlxdist.coordinator.config.schema import BatchConfig, DataConfig, LoraConfig, RunConfig, TrainConfig
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.methods.kinds import Sft
from mlxdist.coordinator.report.display import Display
from mlxdist.coordinator.report.format import StepReport
from mlxdist.coordinator.report.reporter import Reporter
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.coordinator.train import Run, train
from mlxdist.coordinator.training.adamw import FIRST, SECOND, no_moments
from mlxdist.coordinator.training.initial_adapter import draw
from mlxdist.coordinator.training.resume import continued, earlier_sessions, recorded_seconds
from mlxdist.coordinator.training.saver import Saver
from mlxdist.coordinator.training.state import Best, State, identity_of
from mlxdist.coordinator.training.validation import Evaluation, Validation
from mlxdist.node.work.engine import Engine
from mlxdist.protocol.leaves import Row
from tests.laws.memory_fleet import ListRows, make_row, memory_fleet
from tests.laws.model_folder import VOCABULARY

pytestmark = pytest.mark.slow

STEPS = 8
TOLD = ("event", "step", "loss", "grad_norm", "learning_rate", "elapsed_seconds", "tokens", "metrics", "best", "path")


class Dark:
    """A display that shows nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given, **named: None


class InterruptedSaver(Saver):
    """Ctrl-C in the moment after a step was saved."""

    at: int = 0

    def save_if_due(self, state: State, last: bool) -> None:
        super().save_if_due(state, last)
        if state.step == self.at:
            raise KeyboardInterrupt


class InterruptedValidation(Validation):
    """Ctrl-C in the middle of an evaluation."""

    at: int = 0

    def evaluate(self, fleet: Fleet, state: State, step_seconds: float) -> tuple[Evaluation | None, State]:
        if state.step == self.at:
            raise KeyboardInterrupt
        return super().evaluate(fleet, state, step_seconds)


class InterruptedReporter(Reporter):
    """Ctrl-C after a step was taken, before it was told."""

    at: int = 0

    def step(self, report: StepReport) -> None:
        if report.step == self.at:
            raise KeyboardInterrupt
        super().step(report)


class LastSaver(Saver):
    """A coordinator that is killed before it saves a state after step `at`; every step until then is told."""

    at: int = 0

    def save_if_due(self, state: State, last: bool) -> None:
        if state.step <= self.at:
            super().save_if_due(state, last)


SAVERS: dict[str, type[Saver]] = {"save": InterruptedSaver, "kill": LastSaver}


def pace(seed: int | None) -> Callable[[], float]:
    """A clock whose readings are a second apart, or for a seed some random time."""
    random, now = np.random.default_rng(seed), 0.0

    def read() -> float:
        nonlocal now
        now += 1.0 if seed is None else float(random.uniform(0.3, 2.0))
        return now

    return read


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    return [Engine(), Engine()]


def rows(count: int, seed: int) -> list[Row]:
    random = np.random.default_rng(seed)
    lengths = random.integers(4, 30, count).tolist()
    return [make_row(i, random.integers(0, VOCABULARY, n).tolist(), n // 2) for i, n in enumerate(lengths)]


@dataclass
class Sessions:
    """The sessions of one run in one folder."""

    model: Path
    engines: Sequence[Engine]
    folder: Path
    early_stop_evals: int = 0
    max_hours: float | None = None  # in place of STEPS
    seed: int | None = None  # of the clock

    @property
    def config(self) -> RunConfig:
        """Dropout, warmup, a falling learning rate, several epochs, steps of two windows: what a step depends on."""
        return RunConfig(
            model=str(self.model),
            output=self.folder,
            data=DataConfig(path="none"),
            batch=BatchConfig(size=3, grad_accum_steps=2, micro_size=2, max_length=32),
            lora=LoraConfig(rank=4, dropout=0.3),
            train=TrainConfig(
                steps=STEPS if self.max_hours is None else None,
                max_hours=self.max_hours,
                learning_rate=3e-2,
                schedule="cosine",
                warmup_steps=3 if self.max_hours is None else "auto",
                eval_every=2,
                eval_rows="all",
                save_every=1,
                early_stop_evals=self.early_stop_evals,
            ),
        )

    def session(
        self, *, interrupt: str = "", at: int = 0, nodes: int = 1, plant: Callable[[State], State] = lambda state: state
    ) -> State:
        """One session from the saved state on. `interrupt`: "save" | "evaluation" | "report" | "kill", in step `at`."""
        config, run = self.config, RunFolder(self.folder)
        for folder in (run.state, run.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        data, valid = ListRows(rows(14, 1)), ListRows(rows(4, 2))
        report = (InterruptedReporter if interrupt == "report" else Reporter)(
            run, cast(Display, Dark()), clock=lambda: 0.0
        )
        with memory_fleet(config, self.engines[:nodes]) as fleet:
            manifest = fleet.wait_for_model().manifest
            method = Sft(config, cast(Any, data), cast(Any, valid))
            identity = identity_of("same", manifest, "model", "rows")
            earlier = earlier_sessions(run)
            if earlier is None:
                vector = draw(manifest, 0)
                state = State(vector, no_moments(len(vector)), method.unknown_references())
            else:
                state = plant(continued(earlier, run, identity, method.unknown_references()))
            recorded = recorded_seconds(run, state.step)
            report.resume_after(state.step)
            fleet.send_adapter(state.step, state.adapter)
            fleet.wait_for_nodes(nodes, nodes, 0.0)
            saver = SAVERS.get(interrupt, Saver)(run, config, manifest, identity, report)
            validation = (InterruptedValidation if interrupt == "evaluation" else Validation)(
                config, method, len(valid), report
            )
            for one in (report, saver, validation):
                if hasattr(one, "at"):
                    one.at = at
            loop = Run(
                config, method, data, validation, config.train.steps, fleet, report, saver, pace(self.seed), recorded
            )
            if interrupt in ("", "kill"):
                return train(loop, state)
            with pytest.raises(KeyboardInterrupt):
                train(loop, state)
            return state

    def told(self) -> list[dict[str, object]]:
        """The steps in metrics.jsonl, without times."""
        lines = [
            json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines() if "step" in line
        ]
        lines = [line for line in lines if line["event"] != "stage"]  # that steps are taken again is said
        return [{key: line[key] for key in TOLD if key in line} for line in lines]


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
