"""The check of a resumed run: what differs from before, and whether the run may go on with it."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlxdist.coordinator.batch.batch_order import total_steps
from mlxdist.coordinator.config.keys import flat
from mlxdist.coordinator.config.schema import FREE, FREE_OF_TRAIN, LENGTHS, RunConfig, as_json
from mlxdist.coordinator.methods.reference_logps import References, unknown
from mlxdist.coordinator.report.history import read_history
from mlxdist.coordinator.storage.run_folder import RunFolder, read_json
from mlxdist.coordinator.storage.sealed import read_sealed
from mlxdist.coordinator.training.schedule import schedule_phrase, step_learning_rate
from mlxdist.coordinator.training.state import FILE, PREVIOUS, SEMANTICS, Best, State, cure, is_over, load_state
from mlxdist.protocol.errors import UserError
from mlxdist.protocol.methods import METHODS
from mlxdist.protocol.numerics import CHANGES, SEMANTICS_VERSION
from mlxdist.protocol.packing import PACKED
from mlxdist.protocol.vectors import Vector

REFERENCE, REFERENCE_FILE = "reference", "reference.safetensors"


@dataclass(frozen=True)
class Earlier:
    """The result of the run's earlier sessions: the last saved state, and what it belongs to."""

    state: State
    about: Mapping[str, Any]
    previous: bool = False  # it is the state saved before the last one

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that fix what a step means, by dotted key."""
        found: Mapping[str, Any] = self.about.get("settings", {})
        return found

    @property
    def packing(self) -> str:
        """The mode in which its nodes packed rows."""
        return str(self.about.get("packing", PACKED))


def earlier_sessions(folder: RunFolder, *, previous: bool = False) -> Earlier | None:
    """Returns the last saved state; None where nothing was saved yet, and the run starts at its first step.

    `previous`: the state saved before the last one.

    Raises UserError for a state that is damaged, for a finished run without one, and where there is no previous one.
    """
    saved = (folder.state / FILE, folder.state / PREVIOUS, folder.adapters)
    if not previous and not any(path.exists() for path in saved):
        return None
    return Earlier(*load_state(folder, previous=previous), previous)


def recorded_seconds(folder: RunFolder, after: int) -> dict[int, float]:
    """Returns the training time that was told after each step behind the saved step `after`: these are done again."""
    told = read_history(folder.metrics_jsonl).elapsed
    return {step: seconds for step, seconds in told.items() if step > after}


def facts_of(config: RunConfig, data_digest: str) -> dict[str, Any]:
    """Returns the settings that fix what a step means and the digest of the training rows, for the state to carry."""
    settings = {key: value for key, value in flat(as_json(config)) if not is_free(key)}
    return {"settings": settings, "data_digest": data_digest}


def earlier_config(folder: RunFolder, keys: Collection[str]) -> dict[str, Any] | None:
    """Returns the content of `config.json`; None where it is gone, as the state has the settings that matter too.

    Raises UserError where it is damaged or lacks one of the dotted `keys`.
    """
    try:
        before = read_json(folder.config)
        there = dict(flat(before))
        if missing := [key for key in keys if key not in there]:
            raise ValueError(f"it lacks {', '.join(missing[:3])}{' and more' if missing[3:] else ''}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder.config} cannot be used: {error}. Restore the file, or delete it and add --resume again: the "
            "state has the settings that fix the bits too."
        ) from None
    return before


def resume_notes(before: Mapping[str, Any] | None, folder: RunFolder, config: RunConfig, data_digest: str) -> list[str]:
    """Returns the differences from the configuration `before`, that of `config.json`, as sentences for the person.

    Raises UserError when a difference changes the meaning of a step, naming every such key with both values, or when
    the training rows differ.
    """
    if before is None:
        return [f"{folder.config.name} is gone: the settings that fix the bits are those in the state"]
    changed = list(differences(before, as_json(config)))
    meaning = [f"{key} was {old}, is {new}" for key, old, new in changed if not is_free(key)]
    if before.get("data_digest", data_digest) != data_digest:
        meaning.append("the training rows, or how they are tokenized, are not the same")
    if meaning:
        raise UserError(
            f"{folder.path} cannot be resumed under settings that change what a step means: {'; '.join(meaning)}. "
            "Restore the old values, or start a new run from its adapter with lora.init_adapter."
        )
    return [f"resumed with another setting: {key} was {old}, is {new}" for key, old, new in changed if key != "output"]


def seam_notes(before: Mapping[str, Any] | None, config: RunConfig, rows: int, state: State) -> Iterator[str]:
    """Yields the learning rate of the next step with this length of the run and with that in `config.json` (`before`).

    Nothing where the length is the same or not known, or where no step is left. `rows`: the training rows.
    """
    now = config.train
    lengths: dict[str, Any] = {key: ((before or {}).get("train") or {}).get(key) for key in LENGTHS}
    if not any(lengths.values()):
        return
    earlier = replace(now, **lengths)
    steps = total_steps(now, rows, config.batch, config.method)
    if earlier == now or is_over(now, steps, state):
        return
    steps_before = total_steps(earlier, rows, config.batch, config.method)
    rate = step_learning_rate(now, state.step + 1, steps, state.elapsed_seconds)
    rate_before = step_learning_rate(earlier, state.step + 1, steps_before, state.elapsed_seconds)
    yield (
        f"the run has another length: the learning rate of step {state.step + 1} is {rate:.4g} "
        f"({schedule_phrase(now, steps)}), with the earlier length it would be {rate_before:.4g} "
        f"({schedule_phrase(earlier, steps_before)})"
    )


def check_same_run(earlier: Earlier, folder: RunFolder, facts: Mapping[str, Any]) -> None:
    """Raises UserError where the state was saved under settings or with rows other than `facts_of` this run."""
    before, now = earlier.settings, facts["settings"]
    changed = [
        f"{key} was {json.dumps(before[key])}, is {json.dumps(now[key])}"
        for key in before.keys() & now.keys()
        if before[key] != now[key]
    ]
    if earlier.about.get("data_digest", facts["data_digest"]) != facts["data_digest"]:
        changed.append("the training rows are not the same")
    if changed:
        raise UserError(
            f"The state saved in {folder.state} is that of another run ({'; '.join(sorted(changed))}): "
            f"{cure(folder, earlier.previous, facts)}."
        )


def keeps_reference(config: RunConfig) -> bool:
    """Returns true where the reference is the adapter of step 0, which is kept in a file of its own."""
    return bool(METHODS[config.method].reference) and config.preference.reference != "base"


def saved_reference(config: RunConfig, folder: RunFolder) -> Vector | None:
    """Returns the adapter of step 0; None where the reference is the base model.

    Raises UserError where its file is missing, damaged or another run's.
    """
    if not keeps_reference(config):
        return None
    path = folder.state / REFERENCE_FILE
    try:
        tensors, about = read_sealed(path)
        before, now = about["settings"], facts_of(config, "")["settings"]
        if any(before[key] != now[key] for key in before.keys() & now.keys()):
            raise ValueError("it is the reference of another run")
        vector: Vector = tensors[REFERENCE]
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be used: {error}; and the run cannot go on without its reference. Restore the file, or "
            "start a new run."
        ) from None
    return vector


def check_same_rules(earlier: Earlier, folder: RunFolder) -> None:
    """Raises UserError for a run of an mlxdist whose rules gave other bits, and says what has changed since."""
    theirs = int(earlier.about.get(SEMANTICS, 1))  # the first rules were not numbered in the state
    if theirs == SEMANTICS_VERSION:
        return
    changes = [clause for version, clauses in CHANGES.items() if version > theirs for clause in clauses]
    since, whose = (f" ({'; '.join(changes)})", "an older") if changes else ("", "another")
    raise UserError(
        f"{folder.path} was trained under the rules {theirs} of {whose} mlxdist, and this "
        f"one has the rules {SEMANTICS_VERSION}, which give other bits{since}: resume it with the version of mlxdist "
        "that started it, or start a new run from its adapter with lora.init_adapter."
    )


def check_same_bits(earlier: Earlier, folder: RunFolder, numerics_id: str) -> None:
    """Raises UserError where equal settings would give other bits than the run had so far."""
    if (theirs := earlier.about["numerics_id"]) != numerics_id:
        raise UserError(
            f"{folder.path} was trained under other rules, which give other bits (numerics_id {theirs[:12]}, now "
            f"{numerics_id[:12]}): resume it with the version of mlxdist that started it and the configuration in its "
            f"{folder.config.name}, or start a new run from its adapter with lora.init_adapter."
        )


def continued(earlier: Earlier, folder: RunFolder, identity: Mapping[str, str], fresh: References) -> State:
    """Returns the state to go on from. `fresh`: the tables for the rows that there are now, nothing known.

    Raises UserError where the base model, the adapter's tensors, or the number of training rows differ.
    """
    for key, what in (("model_hash", "base model's files"), ("manifest", "adapter's tensors")):
        if earlier.about[key] != identity[key]:
            raise UserError(
                f"{folder.path} cannot be resumed: its {what} have changed (hash {earlier.about[key][:12]}, now "
                f"{identity[key][:12]}). Restore the model that it was started with. Or "
                f"{cure(folder, earlier.previous, {key: identity[key]})}."
            )
    state = earlier.state
    if state.references.train.shape != fresh.train.shape:
        raise UserError(f"{folder.path} was trained on other data: resume it with the same rows.")
    if validation_changed(earlier, identity):  # what is known of the old rows says nothing of the new ones
        known = replace(state.references, valid=unknown(0, *fresh.valid.shape).valid)
        return replace(state, references=known, best=Best(), eval_rows=0)
    return state


def validation_changed(earlier: Earlier, identity: Mapping[str, str]) -> bool:
    """Returns true when the validation rows differ from those before."""
    return bool(earlier.about["valid_digest"] != identity["valid_digest"])


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yields the dotted keys of `now` whose values differ from those in `before`, with both values as JSON."""
    old = dict(flat(before))
    for key, value in flat(json.loads(json.dumps(now))):
        if key in old and old[key] != value:
            yield key, json.dumps(old[key]), json.dumps(value)


def is_free(key: str) -> bool:
    """Returns true for a key that may change when a run is resumed."""
    table, _, name = key.rpartition(".")
    return key.startswith(FREE) or (table == "train" and name in FREE_OF_TRAIN)
