"""The state that --resume needs, in one file, whole or not there: adapter, moments, cursor, references, best."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.numpy import save

from mlxdist.coordinator.config.schema import TrainConfig
from mlxdist.coordinator.methods.reference_logps import References, unknown
from mlxdist.coordinator.storage.run_folder import RunFolder, write_bytes
from mlxdist.coordinator.training.moments import Moments
from mlxdist.protocol.errors import UserError
from mlxdist.protocol.manifest import Manifest, identity
from mlxdist.protocol.vectors import Vector

FILE = "resume.safetensors"
VERSION = 3
ADAPTER, REFERENCES, VALID_REFERENCES = "adapter", "references", "valid_references"  # the rest are moments


@dataclass(frozen=True)
class Best:
    """The best evaluation so far, and the number of evaluations since."""

    step: int = 0
    value: float | None = None
    evals_since: int = 0


@dataclass(frozen=True)
class State:
    """The run between two steps. `moments.step` is the cursor: the number of steps done."""

    adapter: Vector
    moments: Moments
    references: References = field(default_factory=lambda: unknown(0, 0, 0))
    best: Best = field(default_factory=Best)
    eval_rows: int = 0  # the number that "auto" stands for; 0 while unknown
    elapsed_seconds: float = 0.0  # of training up to the end of the last step, over all sessions

    @property
    def step(self) -> int:
        """The number of steps done."""
        return self.moments.step


def is_over(train: TrainConfig, total_steps: int | None, state: State) -> bool:
    """Returns true after the last step: all are taken, the hours are used, or evaluations brought no better one."""
    if stops_early(train.early_stop_evals, state):
        return True
    if total_steps is not None:
        return state.step >= total_steps
    return train.max_hours is not None and state.elapsed_seconds >= 3600 * train.max_hours


def stops_early(early_stop_evals: int, state: State) -> bool:
    """Returns true after so many evaluations without a better one; 0 turns this off."""
    return 0 < early_stop_evals <= state.best.evals_since


def save_state(run: RunFolder, state: State, identity: Mapping[str, str]) -> None:
    """Writes the state, with the `identity` of `identity_of`. Raises SaveError, and then keeps the old one."""
    about = {"version": VERSION, "step": state.step, "best": asdict(state.best), "eval_rows": state.eval_rows}
    about |= {"elapsed_seconds": state.elapsed_seconds, "saved_forwards": state.references.saved_forwards, **identity}
    references = state.references
    tensors = {ADAPTER: state.adapter, **state.moments.vectors}
    tensors |= {REFERENCES: references.train, VALID_REFERENCES: references.valid}
    metadata = {"mlxdist": json.dumps(about, sort_keys=True)}
    write_bytes(run.state / FILE, save(tensors, metadata))


def identity_of(numerics_id: str, manifest: Manifest, model_hash: str, valid_digest: str) -> dict[str, str]:
    """The things that a state belongs to: rules that fix the bits, adapter tensors, base model, validation rows."""
    return {
        "numerics_id": numerics_id,
        "manifest": identity(manifest),
        "model_hash": model_hash,
        "valid_digest": valid_digest,
    }


def load_state(run: RunFolder) -> tuple[State, dict[str, Any]]:
    """Returns the saved state and the values written beside it. Raises UserError for a missing or unreadable file."""
    path = run.state / FILE
    try:
        with safe_open(path, framework="numpy") as file:
            about = json.loads(file.metadata()["mlxdist"])
            vectors = {name: file.get_tensor(name) for name in list(file.keys())}
            adapter, train, valid = (vectors.pop(name) for name in (ADAPTER, REFERENCES, VALID_REFERENCES))
    except FileNotFoundError:
        raise UserError(f"There is nothing to resume in {run.path}: it has no {Path('state') / FILE}.") from None
    except Exception as error:
        cure = "start the run again, or start from a checkpoint with lora.init_adapter"
        raise UserError(f"{path} cannot be read ({error}); {cure}.") from error
    if about["version"] != VERSION:
        raise UserError(
            f"{path} was written by another version of mlxdist (state version {about['version']}, this one has "
            f"{VERSION}): resume it with that version, or start a new run from a checkpoint with lora.init_adapter."
        )
    moments = Moments(about["step"], vectors)
    references = References(train, valid, about["saved_forwards"])
    best, elapsed = Best(**about["best"]), about["elapsed_seconds"]
    return State(adapter, moments, references, best, about["eval_rows"], elapsed), about
