"""The settings that a run may be resumed with: its length and its words may change, the meaning of a step never."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlxdist.coordinator.batch.row_store import RowStore, StoredRows, pack
from mlxdist.coordinator.config.schema import BatchConfig, DataConfig, RunConfig, TrainConfig, as_json
from mlxdist.coordinator.methods.reference_logps import References, unknown
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.coordinator.storage.sealed import seal
from mlxdist.coordinator.training.adamw import no_moments
from mlxdist.coordinator.training.resume import (
    Earlier,
    check_same_bits,
    check_same_rules,
    check_same_run,
    continued,
    earlier_config,
    earlier_sessions,
    facts_of,
    recorded_seconds,
    resume_notes,
    seam_notes,
    validation_changed,
)
from mlxdist.coordinator.training.schedule import schedule_phrase
from mlxdist.coordinator.training.startup import hours_sentences, schedules
from mlxdist.coordinator.training.state import (
    FILE,
    PREVIOUS,
    SEMANTICS,
    VERSION,
    Best,
    State,
    identity_of,
    load_state,
    save_state,
    take_previous,
)
from mlxdist.protocol.errors import UserError
from mlxdist.protocol.numerics import SEMANTICS_VERSION

DIGEST = "a"
CONFIG = RunConfig(model="m", output=Path("runs"), data=DataConfig(path="rows.jsonl"))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path)
    run.config.write_text(json.dumps({**as_json(CONFIG), "data_digest": DIGEST}), encoding="utf-8")
    return run


def notes(folder: RunFolder, config: RunConfig, digest: str = DIGEST) -> list[str]:
    return resume_notes(earlier_config(folder, facts_of(CONFIG, DIGEST)["settings"]), folder, config, digest)


def test_the_same_settings_and_data_need_no_word(folder: RunFolder) -> None:
    assert notes(folder, CONFIG) == []
    assert notes(folder, replace(CONFIG, output=Path("moved"))) == []


def test_a_longer_run_goes_on_and_the_difference_is_said(folder: RunFolder) -> None:
    longer = replace(CONFIG, train=TrainConfig(steps=200, eval_every=10))
    assert notes(folder, longer) == [
        "resumed with another setting: train.steps was 100, is 200",
        "resumed with another setting: train.eval_every was 50, is 10",
    ]


COSINE = replace(CONFIG, train=TrainConfig(schedule="cosine", learning_rate=1e-3, min_lr_ratio=0.0))


def with_length(steps: int | None = None, max_hours: float | None = None) -> RunConfig:
    return replace(COSINE, train=replace(COSINE.train, steps=steps, max_hours=max_hours))


@pytest.mark.parametrize(
    ("now", "length", "rate"),
    [
        (with_length(steps=200), "200 steps", "0.0008536"),
        (with_length(max_hours=2.0), "2 hours", "0.0008536"),  # a quarter of them is used
        (with_length(max_hours=0.75), "0.75 hours", "0.00025"),
    ],
)
def test_another_length_says_both_learning_rates_of_the_next_step(now: RunConfig, length: str, rate: str) -> None:
    state = replace(STATE, moments=replace(STATE.moments, step=50), elapsed_seconds=1800.0)
    [said] = seam_notes(as_json(COSINE), now, 8, state)
    assert said == (
        f"the run has another length: the learning rate of step 51 is {rate} (cosine over {length}), with the earlier "
        "length it would be 0.0005 (cosine over 100 steps)"
    )


def test_the_same_length_and_one_that_leaves_no_step_say_no_learning_rate() -> None:
    state = replace(STATE, moments=replace(STATE.moments, step=50), elapsed_seconds=1800.0)
    for config in (COSINE, with_length(steps=50), with_length(max_hours=0.5)):
        assert list(seam_notes(as_json(COSINE), config, 8, state)) == []
    assert list(seam_notes(None, with_length(steps=200), 8, state)) == []


def test_config_json_has_every_schedule_that_was_followed_with_its_first_step(folder: RunFolder) -> None:
    def session(steps_done: int, config: RunConfig) -> list[tuple[object, object]]:
        followed = schedules(folder, steps_done, schedule_phrase(config.train, config.train.steps))
        folder.config.write_text(json.dumps({**as_json(config), "schedules": followed}), encoding="utf-8")
        return [(each["from_step"], each["schedule"]) for each in followed]

    folder.config.unlink()
    first, longer, hours = (1, "cosine over 100 steps"), (51, "cosine over 200 steps"), (61, "cosine over 8 hours")
    assert session(0, COSINE) == [first]
    assert session(30, COSINE) == [first]
    assert session(50, with_length(steps=200)) == [first, longer]
    assert session(60, with_length(max_hours=8.0)) == [first, longer, hours]
    assert session(45, COSINE) == [first]  # the steps of the others were not saved


def test_a_run_limited_by_hours_says_what_is_used_and_what_the_learning_rate_follows() -> None:
    train = TrainConfig(steps=None, max_hours=8.0, schedule="cosine", warmup_steps="auto")
    follows = "the learning rate follows the hours used: cosine over 8 hours, after a warmup of 0.8 hours"
    assert list(hours_sentences(train, 0.0)) == [follows]
    assert list(hours_sentences(train, 4500.0)) == ["1 h 15 min of 8 hours were used by earlier sessions", follows]
    assert list(hours_sentences(TrainConfig(steps=None, max_hours=8.0), 0.0)) == []
    assert list(hours_sentences(TrainConfig(), 4500.0)) == []


def test_every_setting_that_changes_a_step_is_named_with_both_values(folder: RunFolder) -> None:
    other = replace(CONFIG, batch=BatchConfig(size=4), train=TrainConfig(learning_rate=1e-3))
    with pytest.raises(UserError) as caught:
        notes(folder, other)
    assert "batch.size was 8, is 4; train.learning_rate was 0.0002, is 0.001" in str(caught.value)
    assert "lora.init_adapter" in str(caught.value)


def test_other_training_rows_are_refused_wherever_the_file_stands(folder: RunFolder) -> None:
    with pytest.raises(UserError, match="the training rows, or how they are tokenized, are not the same"):
        notes(folder, CONFIG, "other")
    moved = replace(CONFIG, data=DataConfig(path="elsewhere.jsonl"))
    assert len(notes(folder, moved)) == 1


def test_a_model_that_has_moved_is_no_other_model_and_other_files_are(folder: RunFolder) -> None:
    moved = replace(CONFIG, model="elsewhere/m")
    assert notes(folder, moved) == ['resumed with another setting: model was "m", is "elsewhere/m"']
    with pytest.raises(UserError, match=r"its base model's files have changed \(hash aaaaaaaaaaaa, now bbbbbbbbbbbb\)"):
        continued(EARLIER, folder, {**IDENTITY, "model_hash": "b" * 64}, FRESH)
    with pytest.raises(UserError, match="its adapter's tensors have changed"):
        continued(EARLIER, folder, {**IDENTITY, "manifest": "c" * 64}, FRESH)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[]", r"it holds \[\] in place of a JSON object"),
        ("", "it is empty"),
        ("{", "it is not JSON"),
        ("\0" * 300, "it is not JSON"),
        ("[" * 100_000, "it is nested too deeply"),
        ("{}", r"it lacks method, batch\.size, batch\.grad_accum_steps and more"),
        ('{"batch": []}', "it lacks method"),
    ],
)
def test_a_damaged_config_is_said_in_one_sentence_and_the_run_can_do_without(
    content: str, reason: str, folder: RunFolder
) -> None:
    folder.config.write_text(content)
    with pytest.raises(UserError, match=f"config.json cannot be used: {reason}.*delete it") as caught:
        notes(folder, CONFIG)
    assert len(str(caught.value)) < 600
    folder.config.unlink()
    assert notes(folder, CONFIG) == ["config.json is gone: the settings that fix the bits are those in the state"]


# ---- the state that was saved

IDENTITY = {**identity_of("1" * 64, (), "a" * 64, "valid"), "manifest": "m" * 64}
KNOWN = References(np.ones((3, 1), np.float32), np.ones((2, 1), np.float32), saved_forwards=4)
FRESH = unknown(3, 2, 1)
STATE = State(np.zeros(4, np.float32), replace(no_moments(4), step=7), KNOWN, Best(5, 0.5, 1), eval_rows=2)
EARLIER = Earlier(STATE, IDENTITY)


def test_equal_settings_under_other_rules_are_refused(folder: RunFolder) -> None:
    check_same_bits(EARLIER, folder, "1" * 64)
    with pytest.raises(UserError, match=r"numerics_id 111111111111, now 222222222222\).*version of mlxdist"):
        check_same_bits(EARLIER, folder, "2" * 64)


def test_the_packing_of_earlier_sessions_is_kept() -> None:
    assert Earlier(STATE, {**IDENTITY, "packing": "by piece"}).packing == "by piece"


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ({}, r"under the rules 1 of an older mlxdist.*chunks of tokens.*packed into one.*init_adapter"),
        ({SEMANTICS: 1}, r"under the rules 1 of an older mlxdist.*chunks of tokens.*init_adapter"),
        ({SEMANTICS: SEMANTICS_VERSION + 1}, r"of another mlxdist, and this one has the rules"),
    ],
)
def test_a_run_under_the_rules_of_another_version_is_refused_with_what_has_changed(
    folder: RunFolder, saved: dict[str, int], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        check_same_rules(Earlier(STATE, saved), folder)


def test_a_state_carries_the_rules_of_its_version(folder: RunFolder) -> None:
    folder.state.mkdir()
    save_state(folder, STATE, IDENTITY)
    check_same_rules(Earlier(*load_state(folder)), folder)


def test_the_same_run_goes_on_with_all_that_it_knew(folder: RunFolder) -> None:
    assert continued(EARLIER, folder, IDENTITY, FRESH) is STATE


def test_the_training_time_of_a_state_is_saved_to_the_last_bit_and_that_of_later_steps_is_recorded(
    folder: RunFolder,
) -> None:
    folder.state.mkdir()
    save_state(folder, replace(STATE, elapsed_seconds=1 / 3), IDENTITY)
    assert load_state(folder)[0].elapsed_seconds == 1 / 3
    lines = [{"event": "train", "step": step, "loss": 1.0, "elapsed_seconds": step / 3} for step in range(1, 11)]
    folder.metrics_jsonl.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert recorded_seconds(folder, STATE.step) == {8: 8 / 3, 9: 9 / 3, 10: 10 / 3}


def test_a_state_of_another_version_is_refused_with_what_to_do(folder: RunFolder) -> None:
    folder.state.mkdir()
    (folder.state / FILE).write_bytes(seal({}, {"version": VERSION - 1}))
    with pytest.raises(
        UserError, match=rf"another version of mlxdist \(state version {VERSION - 1}, not {VERSION}\); .*"
    ):
        load_state(folder)


def test_another_number_of_training_rows_is_refused(folder: RunFolder) -> None:
    with pytest.raises(UserError, match="trained on other data"):
        continued(EARLIER, folder, IDENTITY, unknown(4, 2, 1))


@pytest.mark.parametrize("rows", [2, 5])
def test_of_validation_changed_rows_nothing_is_known(folder: RunFolder, rows: int) -> None:
    identity = {**IDENTITY, "valid_digest": "others"}
    assert validation_changed(EARLIER, identity)
    state = continued(EARLIER, folder, identity, unknown(3, rows, 1))
    assert (state.best, state.eval_rows, state.step) == (Best(), 0, 7)
    assert state.references.valid.shape == (rows, 1)
    assert np.isnan(state.references.valid).all()
    assert state.references.train is KNOWN.train
    assert state.references.saved_forwards == 4


def test_a_run_that_saved_nothing_starts_at_its_first_step_and_a_finished_one_without_its_state_is_refused(
    folder: RunFolder,
) -> None:
    assert earlier_sessions(folder) is None
    folder.adapters.write_bytes(b"trained for a night")
    with pytest.raises(UserError, match=r"nothing to resume.*resume\.safetensors"):
        earlier_sessions(folder)
    folder.state.mkdir()
    save_state(folder, STATE, IDENTITY)
    earlier = earlier_sessions(folder)
    assert earlier is not None
    assert earlier.state.step == 7
    assert {key: earlier.about[key] for key in IDENTITY} == IDENTITY


def test_a_state_of_other_settings_or_rows_is_refused_and_the_one_before_it_offered_where_it_is_ours(
    folder: RunFolder,
) -> None:
    ours = facts_of(CONFIG, DIGEST)
    theirs = facts_of(replace(CONFIG, train=TrainConfig(learning_rate=1e-3, steps=7)), "b")
    folder.state.mkdir()
    for facts in (ours, theirs):
        save_state(folder, STATE, {**IDENTITY, **facts})
    swapped = earlier_sessions(folder)
    assert swapped is not None
    words = r"another run \(the training rows are not the same; train\.learning_rate was 0\.001, is 0\.0002\): "
    with pytest.raises(UserError, match=words + "--resume previous goes on .* after step 7"):
        check_same_run(swapped, folder, ours)
    before = earlier_sessions(folder, previous=True)
    assert before is not None
    with pytest.raises(UserError, match=r"train\.learning_rate was 0\.0002, is 0\.001\): start the run again"):
        check_same_run(before, folder, theirs)
    check_same_run(swapped, folder, theirs)


# ---- the two generations of the state


def saved_twice(folder: RunFolder) -> None:
    folder.state.mkdir()
    for step in (6, 7):
        save_state(folder, replace(STATE, moments=replace(STATE.moments, step=step)), IDENTITY)


def steps_of(folder: RunFolder) -> tuple[int, int]:
    return load_state(folder)[0].step, load_state(folder, previous=True)[0].step


@pytest.mark.parametrize("damage", [b"", b"cut", None])
def test_a_damaged_state_is_refused_with_the_one_before_it_which_is_taken_when_asked_for(
    folder: RunFolder, damage: bytes | None
) -> None:
    saved_twice(folder)
    last = folder.state / FILE
    last.write_bytes(damage) if damage is not None else last.unlink()
    with pytest.raises(UserError, match="--resume previous goes on from the state saved before it, after step 6") as e:
        earlier_sessions(folder)
    assert "\n" not in str(e.value)
    earlier = earlier_sessions(folder, previous=True)
    assert earlier is not None
    assert earlier.state.step == 6
    take_previous(folder)
    assert steps_of(folder) == (6, 6)
    save_state(folder, STATE, IDENTITY)
    assert steps_of(folder) == (7, 6)
    assert {path.name for path in folder.state.iterdir()} == {FILE, PREVIOUS}


def test_where_both_generations_are_damaged_none_is_offered(folder: RunFolder) -> None:
    saved_twice(folder)
    for name in (FILE, PREVIOUS):
        (folder.state / name).write_bytes((folder.state / name).read_bytes()[:-1])
    for previous in (False, True):
        with pytest.raises(UserError, match=r"cut or overwritten.*; start the run again, or .* lora\.init_adapter"):
            earlier_sessions(folder, previous=previous)


def test_a_run_with_one_save_has_no_previous_state(folder: RunFolder) -> None:
    folder.state.mkdir()
    save_state(folder, STATE, IDENTITY)
    with pytest.raises(UserError, match=r"nothing to resume: .* has no state/previous\.safetensors"):
        earlier_sessions(folder, previous=True)


def test_generations_are_kept_on_a_disk_without_hard_links(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*names: object) -> None:
        raise OSError(errno.ENOTSUP, "no links here")

    monkeypatch.setattr(os, "link", link)
    saved_twice(folder)
    assert steps_of(folder) == (7, 6)
    take_previous(folder)
    assert steps_of(folder) == (6, 6)


def test_other_rows_kept_back_for_validation_are_other_training_rows() -> None:
    store = RowStore("rows.jsonl", "sft", 8)
    for line in range(1, 5):
        store.add(line, [pack([line, line], [(1, 2)])], 2)
    digests = {StoredRows(store, picks).digest for picks in (None, [0, 1, 2], [0, 1, 3], [0, 1])}
    assert len(digests) == 4
    assert StoredRows(store, [0, 1, 2, 3]).digest == StoredRows(store).digest
