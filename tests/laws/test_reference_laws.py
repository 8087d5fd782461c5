"""The reference: whose parameters it has, when it is computed, and how long it is known."""

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace as replace_struct

from mlxdist.coordinator.config.run_spec import run_spec
from mlxdist.coordinator.methods.reference_logps import References
from mlxdist.node.backward.events import Computing
from mlxdist.node.backward.supervised import Supervised
from mlxdist.node.link.jobs import RowInputs
from mlxdist.node.work import model as models
from mlxdist.node.work.compute import Computer
from mlxdist.protocol import messages as m
from mlxdist.protocol.leaves import Leaf
from mlxdist.protocol.methods import DPO, LABELS, METHODS
from tests.coordinator.training.watched import Recorder, Watched, leaves_without_reference
from tests.laws.preference_cases import BATCH, case_of, labeled, pairs
from tests.laws.preference_runs import assert_equals_one_machine, evaluate_here, train_here, train_plainly, with_rows
from tests.memory_cluster import MemoryCluster
from tests.memory_nodes import MemoryNode


@pytest.fixture
def engines() -> list[Watched]:
    return [Watched() for _ in range(3)]


UNKNOWN = math.nan  # a reference log-prob that the worker is to compute


def row_outputs(
    computer: Computer, leaf: Leaf, loss: str, scalars: Mapping[str, float], inputs: RowInputs
) -> np.ndarray:
    with closing(computer.gradient_parts(leaf, step=1, loss=loss, scalars=scalars, inputs=inputs)) as events:
        return next(event for event in events if not isinstance(event, Computing))


@dataclass(frozen=True)
class Counting(Computer):
    """Counts the forwards under the reference's parameters."""

    forwards: list[int] = field(default_factory=list)

    def _reference_score(self, batches: Sequence[Supervised]) -> list:  # type: ignore[type-arg]
        self.forwards.append(len(batches))
        return super()._reference_score(batches)


# ---- computed once


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "kto"])
def test_the_second_pass_asks_for_no_reference(loss: str, model: Path, engines: list[Watched]) -> None:
    rows = pairs(6) if loss != "kto" else labeled((1, 0, 1, 1, 0, 0))
    ran = train_here(case_of(loss, rows=rows), model, engines[:2])
    assert leaves_without_reference(engines) == {1: 3, 2: 3, 3: 0, 4: 0, 5: 0}
    branches = 1 if loss == "kto" else 2
    assert ran.state.references.saved_forwards == 3 * 3 * branches


def test_a_step_returns_what_it_learned_and_leaves_the_state_before_it_as_it_was(
    model: Path, engines: list[Watched]
) -> None:
    """A step that is interrupted leaves nothing behind, and is taken again by the resumed run."""
    told = Recorder()
    train_here(case_of("sigmoid", rows=pairs(6), total_steps=3), model, engines[:1], recorder=told)
    known = [int((~np.isnan(state.references.train[:, 0])).sum()) for state in told.states]
    assert known == [3, 6, 6]
    assert [state.references.saved_forwards for state in told.states] == [0, 0, 6]


def test_the_reference_of_kl_pairs_is_computed_each_step_for_they_hardly_recur(
    model: Path, engines: list[Watched]
) -> None:
    train_here(case_of("kto", rows=labeled((1, 0, 1, 1, 0, 0))), model, engines[:2])
    assert leaves_without_reference(engines, "score") == dict.fromkeys(range(1, 6), 3)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_a_worker_runs_the_reference_only_for_what_it_is_not_told(loss: str, model: Path) -> None:
    case = case_of(loss)
    spec = run_spec(case.config(model))
    loaded = models.load_with_lora(spec, lambda sentence: None)
    adapter = case.first_adapter(loaded.manifest)
    computer = Counting(loaded, spec, adapter)
    computer.use(adapter)
    rows = case.stored(case.rows).rows(0) + case.stored(case.rows).rows(1)
    leaf = Leaf(0, rows, 2)

    def columns(reference: tuple[float, float], rejected: tuple[float, float]) -> np.ndarray:
        inputs = dict(zip(DPO.reference, (reference, rejected), strict=True))
        scalars = {"beta": 0.1, "label_smoothing": 0.0}
        return row_outputs(computer, leaf, loss, scalars, inputs)

    fresh = columns((UNKNOWN, UNKNOWN), (UNKNOWN, UNKNOWN))
    assert computer.forwards == [1]
    again = columns(tuple(fresh[:, 3].tolist()), tuple(fresh[:, 4].tolist()))
    assert computer.forwards == [1]
    assert np.array_equal(again, fresh)
    mixed = columns((-10.0, UNKNOWN), (-20.0, UNKNOWN))
    assert computer.forwards == [1, 1]
    assert mixed[0, 3:].tolist() == [-10.0, -20.0]
    assert np.array_equal(mixed[1, 3:], fresh[1, 3:])


@pytest.mark.parametrize("segment_size", [0, 1])
@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_policy_and_reference_of_equal_parameters_have_equal_bits_on_every_path_of_the_backward(
    loss: str, segment_size: int, model: Path
) -> None:
    """The gradient's own row sums and the scores of the reference: of the same leaf, under a fresh adapter."""
    case = case_of(loss, fresh=True)
    spec = replace_struct(run_spec(case.config(model)), segment_size=segment_size)
    loaded = models.load_with_lora(spec, lambda sentence: None)
    assert loaded.path.segment_size == segment_size
    adapter = case.first_adapter(loaded.manifest)
    computer = Computer(loaded, spec, adapter)
    computer.use(adapter)
    branches = 2 if loss == "sigmoid" else 1
    rows = tuple(row for place in range(3) for row in case.stored(case.rows).rows(place))
    leaf = Leaf(0, rows, branches)
    names = METHODS[case.method].reference
    inputs = {**dict.fromkeys(names, (UNKNOWN,) * 3), LABELS: (1.0, 0.0, 1.0)}
    scalars = {"beta": 0.1, "label_smoothing": 0.0, "reference_point": 0.0}
    scalars |= {"desirable_weight": 1.0, "undesirable_weight": 1.0}
    columns = row_outputs(computer, leaf, loss, scalars, inputs)
    assert np.array_equal(columns[:, 1 : 1 + branches], columns[:, 1 + branches :])
    assert np.array_equal(columns[:, 1 : 1 + branches], computer.score(leaf))


def test_in_a_leaf_of_known_and_unknown_rows_the_known_one_keeps_its_value(model: Path, engines: list[Watched]) -> None:
    case = case_of("sigmoid", replace(BATCH, size=7, leaf_tokens=400), total_steps=1)

    def row_3(references: References) -> References:
        return with_rows(references, {3: (-10.0, -20.0)})

    knowing = train_here(case, model, engines[:1], knowing=row_3)
    fresh = train_here(case, model, engines[:1])
    others = [row for row in range(7) if row != 3]
    assert knowing.state.references.train[3].tolist() == [-10.0, -20.0]
    assert np.array_equal(knowing.state.references.train[others], fresh.state.references.train[others])
    assert knowing.steps[0].metrics["loss"] != fresh.steps[0].metrics["loss"]
    assert knowing.state.references.saved_forwards == 0  # its leaf went through the reference all the same


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
    everyone: list[MemoryCluster] = []

    def join_at_step_3(step: int, nodes: MemoryCluster) -> None:
        everyone[:] = [nodes]
        if step == 3:
            joined.append(nodes.join(engines[2]))

    late = train_here(case, model, engines[:2], before=join_at_step_3)
    assert {job.assignment.step for job in engines[2].asked} <= {3, 4, 5}
    assert engines[2].asked
    for node in everyone[0].nodes.values():
        offers = [message.kind for message in node.heard if isinstance(message, m.VectorOffer)]
        assert offers.count("reference") == 1
    assert all(job.reference is not None for job in engines[2].asked)
    assert late.sha == train_here(case, model, engines[:1]).sha


def test_the_reference_has_no_dropout_even_where_the_policy_has(model: Path, engines: list[Watched]) -> None:
    """Configurations with dropout are refused; the worker does not rely on that."""
    plain, dropping = case_of("sigmoid"), case_of("sigmoid", dropout=0.5)
    with_dropout = train_here(dropping, model, engines[:1])
    without = train_here(plain, model, engines[:1])
    assert np.array_equal(with_dropout.state.references.train, without.state.references.train)
    assert with_dropout.sha != without.sha


# ---- evaluated


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "kto"])
def test_an_evaluation_gives_the_plain_numbers_and_the_same_ones_each_time(
    loss: str, model: Path, engines: list[Watched]
) -> None:
    valid = pairs(5, seed=9) if loss != "kto" else labeled((1, 0, 0, 1, 1), seed=9)
    case = case_of(loss, replace(BATCH, leaf_tokens=60), valid=valid, total_steps=1)
    first, second, third = evaluate_here(case, model, engines[:2], times=3)
    assert first == second == third
    (plain,) = train_plainly(case, model, taken=[valid])
    assert first.keys() == plain.metrics.keys()
    for name, expected in plain.metrics.items():
        assert first[name] == pytest.approx(expected, rel=1e-5, abs=1e-5)
    parameters = [job.assignment.parameters for job in engines[0].asked if job.assignment.verb == "score"]
    kl_rounds = 3 if loss == "kto" else 0
    assert parameters.count("current+reference") == 1 + kl_rounds
    assert parameters.count("current") == 2
    assert evaluate_here(case, model, engines, times=1) == [first]


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_evaluations_between_the_steps_change_no_bit(loss: str, model: Path, engines: list[Watched]) -> None:
    valid = pairs(4, seed=9) if loss != "kto" else labeled((1, 0, 0, 1), seed=9)
    case = case_of(loss, valid=valid, reference="initial")
    evaluated = train_here(case, model, engines[:2], evaluate_before_each_step=True)
    assert evaluated.sha == train_here(case, model, engines[:2]).sha
