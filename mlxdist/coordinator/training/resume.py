"""The check of a resumed run: what differs from before, and whether the run may go on with it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlxdist.coordinator.config.keys import flat
from mlxdist.coordinator.config.schema import RunConfig, as_json
from mlxdist.coordinator.methods.reference_logps import References, unknown
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.coordinator.training.state import FILE, PREVIOUS, Best, State, load_state
from mlxdist.protocol.errors import UserError

# Keys that change how long a run is, what it says and what it keeps, but not what a step means. The data and the model
# are compared by what was read from them, so that they may have moved.
FREE = ("model", "output", "data.", "timing.")
FREE_OF_TRAIN = (
    *("steps", "epochs", "max_hours", "report_every", "eval_every", "eval_rows", "save_every", "keep_checkpoints"),
    *("best_by", "early_stop_evals", "report_memory", "audit"),
)


@dataclass(frozen=True)
class Earlier:
    """The result of the run's earlier sessions: the last saved state, and what it belongs to."""

    state: State
    about: Mapping[str, Any]


def earlier_sessions(folder: RunFolder, *, previous: bool = False) -> Earlier | None:
    """Returns the last saved state; None where nothing was saved yet, and the run starts at its first step.

    `previous`: the state saved before the last one.

    Raises UserError for a state that is damaged, for a finished run without one, and where there is no previous one.
    """
    saved = (folder.state / FILE, folder.state / PREVIOUS, folder.adapters)
    if not previous and not any(path.exists() for path in saved):
        return None
    return Earlier(*load_state(folder, previous=previous))


def resume_notes(folder: RunFolder, config: RunConfig, data_digest: str) -> list[str]:
    """Returns the differences from the configuration in `config.json`, as sentences for the person.

    Raises UserError when a difference changes the meaning of a step, naming every such key with both values, or when
    the training rows differ.
    """
    try:
        before: dict[str, Any] = json.loads(folder.config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder.config} cannot be read ({error}), and --resume needs it. Restore the file.") from None
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
                f"{identity[key][:12]}). Restore the model that it was started with, or start a new run."
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
