"""The reference: whose parameters it has, when it is computed, how long it is known, and that a run starts clean."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from mlxdist.coordinator.begin import first_state, method_of, reference
from mlxdist.coordinator.method import Method
from mlxdist.coordinator.optimize import no_moments
from mlxdist.coordinator.run_folder import RunFolder
from mlxdist.coordinator.spec import run_spec
from mlxdist.coordinator.state import State, save_state
from mlxdist.node import model as models
from mlxdist.node.backward import MicroBatch
from mlxdist.node.compute import UNKNOWN, Computer
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import NonFiniteError
from mlxdist.protocol.leaves import Leaf
from tests.memory_fleet import MemoryNode, MemoryNodes
from tests.preference_cases import BATCH, case_of, labelled, pairs
from tests.preference_runs import (
    Recorder,
    Watched,
    assert_equals_one_machine,
    evaluate_here,
    train_here,
    train_plainly,
)


@pytest.fixture
def engines() -> list[Watched]:
    return [Watched() for _ in range(3)]


def leaves_without_reference(engines: Sequence[Watched], verb: str = "gradient") -> dict[int, int]:
    """Step -> the leaves for which the workers were asked to compute the reference."""
    found: dict[int, int] = {}
    for engine in engines:
        for work in engine.asked:
            if work.task.verb != verb:
                continue
            names = ("reference", "reference_rejected")
            asked = [any(np.isnan(leaf.get(name, ())).any() for name in names) for leaf in work.numbers]
            if verb == "score":
                asked = ["reference" in work.task.parameters] * len(work.leaves)
            found[work.task.step] = found.get(work.task.step, 0) + sum(asked)
    return found


@dataclass(frozen=True)
class Counting(Computer):
    """Counts the forwards under the reference's parameters."""

    forwards: list[int] = field(default_factory=list)

    def _reference_score(self, batches: Sequence[MicroBatch]) -> list:  # type: ignore[type-arg]
        self.forwards.append(len(batches))
        return super()._reference_score(batches)


# ---- computed once


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "kto"])
def test_the_second_pass_asks_for_no_reference(loss: str, model: Path, engines: list[Watched]) -> None:
    rows = pairs(6) if loss != "kto" else labelled((1, 0, 1, 1, 0, 0))
    ran = train_here(case_of(loss, rows=rows), model, engines[:2])
    assert leaves_without_reference(engines) == {1: 3, 2: 3, 3: 0, 4: 0, 5: 0}
    branches = 1 if loss == "kto" else 2
    assert ran.method.references.saved_forwards == 3 * 3 * branches


def test_the_reference_of_kl_pairs_is_computed_each_step_for_they_hardly_recur(
    model: Path, engines: list[Watched]
) -> None:
    train_here(case_of("kto", rows=labelled((1, 0, 1, 1, 0, 0))), model, engines[:2])
    assert leaves_without_reference(engines, "score") == dict.fromkeys(range(1, 6), 3)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_a_worker_runs_the_reference_only_for_what_it_is_not_told(loss: str, model: Path) -> None:
    case = case_of(loss)
    spec = run_spec(case.config(model))
    loaded = models.load(spec, lambda sentence: None)
    adapter = case.first_adapter(loaded.manifest)
    computer = Counting(loaded, spec, adapter)
    computer.use(adapter)
    rows = case.stored(case.rows).rows(0) + case.stored(case.rows).rows(1)
    leaf = Leaf(0, rows, tuple(max(len(row.ids) for row in rows[side::2]) for side in (0, 1)))

    def columns(reference: tuple[float, float], rejected: tuple[float, float]) -> np.ndarray:
        inputs = {"reference": reference, "reference_rejected": rejected}
        scalars = {"beta": 0.1, "label_smoothing": 0.0}
        return computer.gradient(leaf, step=1, loss=loss, scalars=scalars, inputs=inputs)[1]

    fresh = columns((UNKNOWN, UNKNOWN), (UNKNOWN, UNKNOWN))
    assert computer.forwards == [2]
    again = columns(tuple(fresh[:, 3].tolist()), tuple(fresh[:, 4].tolist()))
    assert computer.forwards == [2]
    assert np.array_equal(again, fresh)
    mixed = columns((-10.0, UNKNOWN), (-20.0, UNKNOWN))
    assert computer.forwards == [2, 2]
    assert mixed[0, 3:].tolist() == [-10.0, -20.0]
    assert np.array_equal(mixed[1, 3:], fresh[1, 3:])


def test_in_a_leaf_of_known_and_unknown_rows_the_known_one_keeps_its_value(model: Path, engines: list[Watched]) -> None:
    case = case_of("sigmoid", replace(BATCH, size=7, micro_size=7), total_steps=1)

    def knowing_row_3(method: Method) -> State:
        method.references.train[3] = (-10.0, -20.0)
        vector = case.first_adapter(models.load(run_spec(case.config(model)), lambda sentence: None).manifest)
        return State(vector, no_moments(len(vector)), method.references)

    knowing = train_here(case, model, engines[:1], start=knowing_row_3)
    fresh = train_here(case, model, engines[:1])
    others = [row for row in range(7) if row != 3]
    assert knowing.method.references.train[3].tolist() == [-10.0, -20.0]
    assert np.array_equal(knowing.method.references.train[others], fresh.method.references.train[others])
    assert knowing.steps[0].metrics["loss"] != fresh.steps[0].metrics["loss"]
    assert knowing.method.references.saved_forwards == 0  # its leaf went through the reference all the same


# ---- of which parameters


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_the_initial_reference_is_the_adapter_at_step_0(loss: str, model: Path, engines: list[Watched]) -> None:
    case = case_of(loss, reference="initial")
    initial = assert_equals_one_machine(case, model, engines[:2])
    assert initial.sha != train_here(case_of(loss), model, engines[:1]).sha


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_a_late_joiner_gets_the_initial_reference_and_changes_no_bit(
    loss: str, model: Path, engines: list[Watched]
) -> None:
    case = case_of(loss, reference="initial")
    joined: list[MemoryNode] = []
    everyone: list[MemoryNodes] = []

    def join_at_step_3(step: int, nodes: MemoryNodes) -> None:
        everyone[:] = [nodes]
        if step == 3:
            joined.append(nodes.join(engines[2]))

    late = train_here(case, model, engines[:2], before=join_at_step_3)
    assert {work.task.step for work in engines[2].asked} <= {4, 5} != set()
    assert engines[2].asked
    for node in everyone[0].nodes:
        offers = [message.kind for message in node.heard if isinstance(message, m.VectorOffer)]
        assert offers.count("reference") == 1
    assert all(work.reference is not None for work in engines[2].asked)
    assert late.sha == train_here(case, model, engines[:1]).sha


def test_the_reference_has_no_dropout_even_where_the_policy_has(model: Path, engines: list[Watched]) -> None:
    """Configurations with dropout are refused; the worker does not rely on that."""
    plain, dropping = case_of("sigmoid"), case_of("sigmoid", dropout=0.5)
    with_dropout = train_here(dropping, model, engines[:1])
    without = train_here(plain, model, engines[:1])
    assert np.array_equal(with_dropout.method.references.train, without.method.references.train)
    assert with_dropout.sha != without.sha


# ---- evaluated


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "kto"])
def test_an_evaluation_gives_the_plain_numbers_and_the_same_ones_each_time(
    loss: str, model: Path, engines: list[Watched]
) -> None:
    valid = pairs(5, seed=9) if loss != "kto" else labelled((1, 0, 0, 1, 1), seed=9)
    case = case_of(loss, replace(BATCH, micro_size=2), valid=valid, total_steps=1)
    first, second, third = evaluate_here(case, model, engines[:2], times=3)
    assert first == second == third
    (plain,) = train_plainly(case, model, taken=[valid])
    assert first.keys() == plain.metrics.keys()
    for name, expected in plain.metrics.items():
        assert first[name] == pytest.approx(expected, rel=1e-5, abs=1e-5)
    parameters = [work.task.parameters for work in engines[0].asked if work.task.verb == "score"]
    kl_rounds = 3 if loss == "kto" else 0
    assert parameters.count("current+reference") == 1 + kl_rounds
    assert parameters.count("current") == 2
    assert evaluate_here(case, model, engines, times=1) == [first]


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_evaluations_between_the_steps_change_no_bit(loss: str, model: Path, engines: list[Watched]) -> None:
    valid = pairs(4, seed=9) if loss != "kto" else labelled((1, 0, 0, 1), seed=9)
    case = case_of(loss, valid=valid, reference="initial")
    evaluated = train_here(case, model, engines[:2], evaluate_before_each_step=True)
    assert evaluated.sha == train_here(case, model, engines[:2]).sha


# ---- resumed


class SavesAfter2(Recorder):
    """Saves the state after step 2, as a run that is interrupted there."""

    folder: RunFolder

    def save_if_due(self, state: State, last: bool) -> None:
        super().save_if_due(state, last)
        if state.step == 2:
            save_state(self.folder, state, {"numerics_id": "same"})


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "kto"])
@pytest.mark.parametrize("which", ["base", "initial"])
def test_a_resumed_run_has_the_bits_of_an_unbroken_one_and_asks_for_no_reference_twice(
    loss: str, which: str, model: Path, engines: list[Watched], tmp_path: Path
) -> None:
    case = case_of(loss, reference=which)
    folder = RunFolder(tmp_path)
    folder.state.mkdir()
    recorder = SavesAfter2()
    recorder.folder = folder
    unbroken = train_here(case, model, engines[:1], recorder=recorder)
    asked = leaves_without_reference(engines)
    for engine in engines:
        engine.asked.clear()
    config = case.config(model)
    resumed = train_here(
        case, model, engines[:2], start=lambda method: first_state(config, (), folder, True, "same", method)
    )
    assert resumed.sha == unbroken.sha
    assert [step.metrics for step in resumed.steps] == [step.metrics for step in unbroken.steps[2:]]
    assert np.array_equal(resumed.method.references.train, unbroken.method.references.train)
    assert resumed.method.references.saved_forwards == unbroken.method.references.saved_forwards
    assert leaves_without_reference(engines) == {step: count for step, count in asked.items() if step > 2}


def test_the_initial_reference_is_kept_beside_the_state(model: Path, tmp_path: Path) -> None:
    config = case_of("sigmoid", reference="initial").config(model)
    folder = RunFolder(tmp_path)
    folder.state.mkdir()
    first, later = (np.arange(4, dtype=np.float32) + shift for shift in (0, 1))
    at_start = reference(config, folder, State(first, no_moments(4)))
    after = reference(config, folder, State(later, replace(no_moments(4), step=3)))
    assert at_start is not None
    assert after is not None
    assert at_start.tolist() == after.tolist() == first.tolist()


# ---- clean beginnings, and bad ends


def test_a_second_run_in_the_same_processes_starts_clean(model: Path, engines: list[Watched]) -> None:
    """After KTO against the initial adapter: neither its reference, nor its adapter, nor the model's mode is left."""
    train_here(case_of("kto", reference="initial"), model, engines[:2])
    second = train_here(case_of("sigmoid"), model, engines[:2])
    assert second.sha == train_here(case_of("sigmoid"), model, [Watched(), Watched()]).sha
    assert second.steps[0].metrics == train_here(case_of("sigmoid"), model, [Watched()]).steps[0].metrics


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_a_loss_that_is_not_finite_names_its_leaf_and_rows_and_takes_no_step(
    loss: str, model: Path, engines: list[Watched]
) -> None:
    rows = pairs(8) if loss == "sigmoid" else labelled((1, 0, 1, 1, 0, 0, 1, 0))
    case = case_of(loss, replace(BATCH, size=4, micro_size=2), rows=rows)
    second_leaf = case.order()[1].windows[0][2:]
    row = second_leaf[1]

    def make(*arguments: object) -> Method:
        method = method_of(*arguments)  # type: ignore[arg-type]
        method.references.train[row] = np.inf
        return method

    recorder = Recorder()
    with pytest.raises(NonFiniteError) as caught:
        train_here(case, model, engines[:2], make=make, recorder=recorder)  # type: ignore[arg-type]
    branches = 2 if loss == "sigmoid" else 1
    named = ", ".join(str(each) for each in second_leaf for _ in range(branches))
    assert f"step 2, leaf 1, rows {named}" in str(caught.value)
    assert len(recorder.states) == 1  # step 1 was taken, step 2 was not
    assert train_here(case, model, engines[:2]).sha == train_here(case, model, [Watched()]).sha


def test_a_kl_pair_that_is_not_finite_is_named_before_the_reference_point(model: Path, engines: list[Watched]) -> None:
    case = case_of("kto", replace(BATCH, micro_size=2))

    def broken(method: Method) -> State:
        vector = np.full_like(
            case.first_adapter(models.load(run_spec(case.config(model)), lambda sentence: None).manifest), np.nan
        )
        return State(vector, no_moments(len(vector)), method.references)

    first, second = case.order()[0].windows[0][:2]
    with pytest.raises(NonFiniteError, match=f"KL pairs of step 1, leaf 0, rows {first}, {second}"):
        train_here(case, model, engines[:1], start=broken)
