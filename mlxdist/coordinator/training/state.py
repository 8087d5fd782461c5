"""The state that --resume needs: adapter, moments, cursor, references, best, in one file that carries its SHA-256.

state/resume.safetensors     the last saved step
state/previous.safetensors   the save before, for `--resume previous`
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlxdist.coordinator.config.schema import TrainConfig
from mlxdist.coordinator.methods.reference_logps import References, unknown
from mlxdist.coordinator.storage.run_folder import RunFolder, keep_as, write_bytes
from mlxdist.coordinator.storage.sealed import read_sealed, seal
from mlxdist.coordinator.training.moments import Moments
from mlxdist.protocol.errors import UserError
from mlxdist.protocol.manifest import Manifest, identity
from mlxdist.protocol.numerics import SEMANTICS_VERSION
from mlxdist.protocol.vectors import Vector

FILE, PREVIOUS = "resume.safetensors", "previous.safetensors"
VERSION = 4
SEMANTICS = "semantics"  # the key of the version of the rules that fix the bits
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


def save_state(run: RunFolder, state: State, identity: Mapping[str, object]) -> None:
    """Writes the state and what it belongs to (`identity`); the state before becomes the previous one.

    Raises SaveError, and then keeps the old one.
    """
    about = {
        "version": VERSION,
        SEMANTICS: SEMANTICS_VERSION,
        "step": state.step,
        "best": asdict(state.best),
        "eval_rows": state.eval_rows,
    }
    about |= {"elapsed_seconds": state.elapsed_seconds, "saved_forwards": state.references.saved_forwards, **identity}
    references = state.references
    tensors = {ADAPTER: state.adapter, **state.moments.vectors}
    tensors |= {REFERENCES: references.train, VALID_REFERENCES: references.valid}
    write_bytes(run.state / FILE, seal(tensors, about), previous=run.state / PREVIOUS)


def identity_of(numerics_id: str, manifest: Manifest, model_hash: str, valid_digest: str) -> dict[str, str]:
    """The things that a state belongs to: rules that fix the bits, adapter tensors, base model, validation rows."""
    return {
        "numerics_id": numerics_id,
        "manifest": identity(manifest),
        "model_hash": model_hash,
        "valid_digest": valid_digest,
    }


def load_state(run: RunFolder, *, previous: bool = False) -> tuple[State, dict[str, Any]]:
    """Returns the last saved state, or the one before it, and the values written beside it.

    Raises UserError for a missing or damaged file, which offers the previous state where that one is whole.
    """
    path = run.state / (PREVIOUS if previous else FILE)
    try:
        return _read_state(path)
    except FileNotFoundError:
        there = f"{run.path} has no {path.relative_to(run.path)}"
        raise UserError(f"There is nothing to resume: {there}; {cure(run, previous)}.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be used: {error}; {cure(run, previous)}.") from None


def cure(run: RunFolder, previous: bool, wanted: Mapping[str, object] = MappingProxyType({})) -> str:
    """Returns what to do about the last state (or the `previous` one) that cannot be used.

    The state before it is offered where that one is whole, and has the `wanted` values beside it.
    """
    with suppress(OSError, ValueError):
        state, about = _read_state(run.state / PREVIOUS)
        if not previous and all(about.get(key) == value for key, value in wanted.items()):
            return f"--resume previous goes on from the state saved before it, after step {state.step}"
    return "start the run again, or start from a checkpoint with lora.init_adapter"


def take_previous(run: RunFolder) -> None:
    """Makes the previous state the last one too. The last one is dropped. Raises SaveError."""
    keep_as(run.state / PREVIOUS, run.state / FILE)


def _read_state(path: Path) -> tuple[State, dict[str, Any]]:
    """Raises OSError or ValueError, with the reason as a clause."""
    vectors, about = read_sealed(path)
    if about.get("version") != VERSION:
        raise ValueError(
            f"it was written by another version of mlxdist (state version {about.get('version')}, not {VERSION})"
        )
    try:
        adapter, train, valid = (vectors.pop(name) for name in (ADAPTER, REFERENCES, VALID_REFERENCES))
        references = References(train, valid, about["saved_forwards"])
        moments = Moments(about["step"], vectors)
        best, elapsed = Best(**about["best"]), about["elapsed_seconds"]
        return State(adapter, moments, references, best, about["eval_rows"], elapsed), about
    except (KeyError, TypeError) as error:
        raise ValueError(f"it lacks a part ({error})") from None
