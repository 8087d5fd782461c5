"""Preference runs that are resumed, started again, or fail: the references are known again, nothing is left over."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlxdist.coordinator.batch.micro_batches import cut, cut_kl
from mlxdist.coordinator.config.run_spec import run_spec
from mlxdist.coordinator.methods.method import Method
from mlxdist.coordinator.methods.reference_logps import References
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.coordinator.training.adamw import no_moments
from mlxdist.coordinator.training.resume import continued, earlier_sessions
from mlxdist.coordinator.training.startup import reference
from mlxdist.coordinator.training.state import State, identity_of, save_state
from mlxdist.node.work import model as models
from mlxdist.protocol.errors import NonFiniteError
from tests.coordinator.training.watched import Recorder, Watched, leaves_without_reference
from tests.laws.preference_cases import BATCH, case_of, labeled, pairs
from tests.laws.preference_runs import train_here, with_rows


@pytest.fixture
def engines() -> list[Watched]:
    return [Watched() for _ in range(3)]


IDENTITY = identity_of("same", (), "model", "")


# ---- resumed


class SavesAfter2(Recorder):
    """Saves the state after step 2, as a run that is interrupted there."""

    folder: RunFolder

    def save_if_due(self, state: State, last: bool) -> None:
        super().save_if_due(state, last)
        if state.step == 2:
            save_state(self.folder, state, IDENTITY)


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

    def going_on(method: Method) -> State:
        earlier = earlier_sessions(folder)
        assert earlier is not None
        return continued(earlier, folder, IDENTITY, method.unknown_references())

    resumed = train_here(case, model, engines[:2], start=going_on)
    assert resumed.sha == unbroken.sha
    assert [step.metrics for step in resumed.steps] == [step.metrics for step in unbroken.steps[2:]]
    assert np.array_equal(resumed.state.references.train, unbroken.state.references.train)
    assert resumed.state.references.saved_forwards == unbroken.state.references.saved_forwards
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
    rows = pairs(8) if loss == "sigmoid" else labeled((1, 0, 1, 1, 0, 0, 1, 0))
    case = case_of(loss, replace(BATCH, size=4, leaf_tokens=60), rows=rows)
    made = cut(case.order()[1], case.stored(case.rows), 60)
    start = made.leaves[0].items
    second_leaf = made.order[start : start + made.leaves[1].items]
    row = second_leaf[-1]

    def broken(references: References) -> References:
        return with_rows(references, {row: np.inf})

    recorder = Recorder()
    with pytest.raises(NonFiniteError) as caught:
        train_here(case, model, engines[:2], knowing=broken, recorder=recorder)
    branches = made.leaves[1].branches
    ids = ", ".join(dict.fromkeys(str(each) for each in second_leaf for _ in range(branches)))
    places = ", ".join(f"rows.jsonl:{each + 1}" for each in second_leaf)
    assert f"NaN or Inf in leaf 1 of step 2 (rows {ids}), on node-" in str(caught.value)
    assert {name for name in ("node-0", "node-1") if name in str(caught.value)} == {"node-0", "node-1"}
    assert str(caught.value).endswith(f"The leaf holds {places}")
    assert len(recorder.states) == 1  # step 1 was taken, step 2 was not
    assert train_here(case, model, engines[:2]).sha == train_here(case, model, [Watched()]).sha


def test_a_kl_pair_that_is_not_finite_is_named_before_the_reference_point(model: Path, engines: list[Watched]) -> None:
    case = case_of("kto", replace(BATCH, leaf_tokens=60))

    def broken(method: Method) -> State:
        vector = np.full_like(
            case.first_adapter(models.load_with_lora(run_spec(case.config(model)), lambda sentence: None).manifest),
            np.nan,
        )
        return State(vector, no_moments(len(vector)), method.unknown_references())

    made = cut_kl(case.order()[0], case.stored(case.rows), 60)
    rows = made.order[: made.leaves[0].items]
    ids, places = ", ".join(map(str, rows)), ", ".join(f"rows.jsonl:{row + 1}" for row in rows)
    named = rf"KL pairs of leaf 0 of step 1 \(rows {ids}\): .* {places}"
    with pytest.raises(NonFiniteError, match=named):
        train_here(case, model, engines[:1], start=broken)
