"""Whether a run may go on under the configuration that it is resumed with: what differs, and what that means."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mlxdist.coordinator.config import RunConfig, as_json
from mlxdist.coordinator.config_keys import flat
from mlxdist.coordinator.run_folder import RunFolder
from mlxdist.protocol.errors import UserError

# Keys that change how long a run is, what it says and what it keeps, but not what a step means. The data are compared
# by what was read from them, so that they may have moved.
FREE = ("output", "data.", "timing.")
FREE_OF_TRAIN = (
    *("steps", "passes", "max_hours", "report_every", "eval_every", "eval_rows", "save_every", "keep_checkpoints"),
    *("best_by", "early_stop_evals", "report_memory"),
)


DATA = {
    "data_digest": "the training rows, or how they are tokenised, are not the same",
    "valid_digest": "the validation rows, or how they are tokenised, are not the same",
}


def resume_notes(folder: RunFolder, config: RunConfig, digests: Mapping[str, str]) -> list[str]:
    """What differs from the configuration in `config.json`, as sentences for the person; `digests` are the data's.

    Raises UserError when a difference changes the meaning of a step, naming every such key with both values, or when
    the rows are others.
    """
    try:
        before: dict[str, Any] = json.loads(folder.config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder.config} cannot be read ({error}); it belongs to what --resume needs.") from None
    changed = list(differences(before, as_json(config)))
    meaning = [f"{key} was {old}, is {new}" for key, old, new in changed if not is_free(key)]
    meaning += [what for key, what in DATA.items() if before.get(key, digests[key]) != digests[key]]
    if meaning:
        raise UserError(
            f"{folder.path} cannot be resumed under settings that change what a step means: {'; '.join(meaning)}. "
            "Give back the old values, or start a new run from its adapter with lora.init_adapter."
        )
    return [f"resumed with another setting: {key} was {old}, is {new}" for key, old, new in changed if key != "output"]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Dotted keys of `now` whose values in `before` are others, with both as JSON."""
    old = dict(flat(before))
    for key, value in flat(json.loads(json.dumps(now))):
        if key in old and old[key] != value:
            yield key, json.dumps(old[key]), json.dumps(value)


def is_free(key: str) -> bool:
    """Whether the key may be another one after a resume."""
    table, _, name = key.rpartition(".")
    return key.startswith(FREE) or (table == "train" and name in FREE_OF_TRAIN)
