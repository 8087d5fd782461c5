"""The preference laws see every planted bug: in the plain loop that they compare with, and in the trainer itself."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlxdist.coordinator.methods.method import Method
from mlxdist.coordinator.methods.reference_logps import References
from mlxdist.coordinator.training.adamw import no_moments
from mlxdist.coordinator.training.state import State
from mlxdist.node.work.compute import Computer
from mlxdist.protocol.methods import DPO
from tests.cases import slow_but
from tests.coordinator.training.watched import Recorder, Watched, leaves_without_reference
from tests.laws.planted_bugs import BUGS, assert_same_training
from tests.laws.planted_methods import (
    AllFresh,
    MeanOfMeans,
    Miscounting,
    NotClamped,
    OwnReferencePoints,
    PartsInOrder,
    ReferenceIsThePolicy,
    ReferenceLeftInPlace,
    ReferenceOfNoAdapter,
    ReferenceWithDropout,
    RollsWithinNodes,
    RollsWithinWindows,
    forgetful_of,
    made,
    with_mask_one_early,
)
from tests.laws.preference_cases import BATCH, case_of, labeled, pairs
from tests.laws.preference_runs import (
    Case,
    MakeMethod,
    Ran,
    assert_equals_one_machine,
    train_here,
    train_plainly,
    with_rows,
)
from tests.memory_nodes import RestartedError

LOSS = {"dpo": "sigmoid", "kto": "kto"}
TWO_WINDOWS = replace(BATCH, size=2, grad_accum_steps=2)


@pytest.fixture(scope="module")
def right(model: Path) -> dict[str, Ran]:
    return {method: train_here(against_initial(loss), model, [Watched()]) for method, loss in LOSS.items()}


def against_initial(loss: str) -> Case:
    """A base has no LoRA layers, and so no dropout that could show."""
    return case_of(loss, reference="initial")


@pytest.mark.parametrize(
    ("name", "method"), [(name, method) for name, bug in BUGS.items() for method in bug.methods if method != "sft"]
)
def test_training_does_not_equal_a_plain_loop_with_the_bug(
    name: str, method: str, right: dict[str, Ran], model: Path
) -> None:
    wrong = train_plainly(against_initial(LOSS[method]), model, BUGS[name].parts)
    with pytest.raises(AssertionError):
        assert_same_training(right[method].steps, wrong)


METHODS: dict[str, tuple[str, MakeMethod]] = {
    "mask off by one, dpo": ("sigmoid", with_mask_one_early),
    "mean of means": ("sigmoid", made(MeanOfMeans)),
    "own reference points": ("kto", made(OwnReferencePoints)),
    "roll within nodes": ("kto", made(RollsWithinNodes)),
    "roll within windows": ("kto", made(RollsWithinWindows)),
    "un-clamped z0": ("kto", made(NotClamped)),
}


@pytest.mark.parametrize("name", slow_but(("mean of means",), METHODS))
def test_a_wrong_method_is_not_equal_to_the_plain_loop(name: str, model: Path) -> None:
    loss, make = METHODS[name]
    batch = TWO_WINDOWS if "windows" in name else BATCH
    assert_equals_one_machine(case_of(loss, batch), model, [Watched()])
    with pytest.raises(AssertionError):
        assert_equals_one_machine(case_of(loss, batch), model, [Watched()], make=make)


WORKERS: dict[str, tuple[type[Computer], str]] = {
    "reference with dropout": (ReferenceWithDropout, "initial"),
    "reference left in place": (ReferenceLeftInPlace, "base"),
    "reference is the policy": (ReferenceIsThePolicy, "base"),
    "reference of no adapter": (ReferenceOfNoAdapter, "initial"),
}


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
@pytest.mark.parametrize("name", slow_but(("reference is the policy",), WORKERS))
def test_a_wrong_worker_is_not_equal_to_the_plain_loop(name: str, loss: str, model: Path) -> None:
    kind, reference = WORKERS[name]
    case = case_of(loss, reference=reference)
    assert_equals_one_machine(case, model, [Miscounting()])  # the way in changes nothing
    with pytest.raises(AssertionError):
        assert_equals_one_machine(case, model, [Miscounting(kind)])


def test_a_reference_with_dropout_has_no_first_step_of_rewards_0(model: Path) -> None:
    case = case_of("sigmoid", reference="initial", total_steps=1)
    metrics = train_here(case, model, [Miscounting(ReferenceWithDropout)]).steps[0].metrics
    assert metrics["rewards/margins"] != 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mean of means", "own reference points", "roll within nodes", "sums in order"])
def test_what_depends_on_the_nodes_does_not_have_the_bits_of_one_node(name: str, model: Path) -> None:
    loss, make = METHODS.get(name, ("sigmoid", made(PartsInOrder)))
    case = case_of(loss, replace(BATCH, size=7))
    one = train_here(case, model, [Watched()])
    assert train_here(case, model, [Watched(), Watched()]).sha == one.sha
    wrong = train_here(case, model, [Watched()], make=make)
    assert wrong.sha != one.sha
    if name == "sums in order":  # nearly right: only bits can tell
        assert_equals_one_machine(case, model, [Watched()], make=make)


def test_forgotten_references_are_computed_again(model: Path) -> None:
    engine = Watched()
    case = case_of("sigmoid", rows=pairs(6))
    forgetful = train_here(case, model, [engine], knowing=forgetful_of)
    asked = [np.isnan(leaf[DPO.reference[0]]).any() for job in engine.asked for leaf in job.row_inputs]
    assert asked == [True] * 15
    assert forgetful.state.references.saved_forwards == 0
    assert forgetful.sha == train_here(case, model, [engine]).sha  # the numbers cannot tell


def test_a_worker_that_ignores_what_is_known_is_found_wrong(model: Path) -> None:
    case = case_of("kto", replace(BATCH, size=5, leaf_tokens=150), rows=labeled((1, 0, 1, 0, 1)), total_steps=1)

    def row_2(references: References) -> References:
        return with_rows(references, {2: -10.0})

    assert train_here(case, model, [Miscounting(Computer)], knowing=row_2).steps[0].metrics["loss"]
    with pytest.raises(RestartedError):
        train_here(case, model, [Miscounting(AllFresh)], knowing=row_2)


def test_a_resume_that_loses_the_references_asks_again_and_one_that_loses_the_moments_has_other_bits(
    model: Path,
) -> None:
    case, told = case_of("sigmoid", rows=pairs(6)), Recorder()
    unbroken = train_here(case, model, [Watched()], recorder=told)
    after_2, engine = told.states[1], Watched()

    def forgetting(method: Method) -> State:
        return replace(after_2, references=method.unknown_references())

    forgetful = train_here(case, model, [engine], start=forgetting)
    assert forgetful.sha == unbroken.sha
    assert leaves_without_reference([engine]) == {3: 3, 4: 3, 5: 0}  # an unbroken run asks for none
    lost = replace(no_moments(len(after_2.adapter)), step=after_2.step)
    wrong = train_here(case, model, [Watched()], start=lambda method: replace(after_2, moments=lost))
    assert wrong.sha != unbroken.sha
