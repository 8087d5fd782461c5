"""The adapters that a run has saved, and the choice of some of them by name: best, last, all, or a step."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlxdist.coordinator.storage.checkpoints import best_checkpoint, list_checkpoints
from mlxdist.coordinator.storage.run_folder import RunFolder, read_json
from mlxdist.protocol.errors import UserError


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """One adapter folder of a run."""

    folder: Path
    step: int | None  # that made it; None where the run's summary does not say
    best: bool = False  # the best evaluation of the run

    @property
    def name(self) -> str:
        """The adapter in words: "step 50 (best)"."""
        return ("final" if self.step is None else f"step {self.step}") + (" (best)" if self.best else "")


def all_adapters(run: RunFolder) -> tuple[SavedAdapter, ...]:
    """Returns the adapters of a run, oldest step first: its checkpoints, and the final one where it is none of them."""
    best = best_checkpoint(run)
    whole = [each for each in list_checkpoints(run) if RunFolder(each.path).adapters.is_file()]
    found = [SavedAdapter(each.path, each.step, each.path == best) for each in whole]
    if run.adapters.is_file():
        step = _final_step(run)
        if step not in [each.step for each in found] and (step is not None or not found):
            found.append(SavedAdapter(run.path, step))
    return tuple(sorted(found, key=lambda each: each.step or 0))


def choose_adapters(run: RunFolder, wanted: Sequence[str]) -> tuple[SavedAdapter, ...]:
    """Returns the adapters that `wanted` names, oldest step first, each once; without a name the best and the last.

    A name is "best", "last", "all", or a step; several may stand in one text, with commas.

    Raises UserError for one that the run does not have.
    """
    there = all_adapters(run)
    if not there:
        raise UserError(
            f"{run.path} has no adapter yet: a run saves one at every evaluation (train.eval_every) and at its end."
        )
    names = [name.strip() for text in wanted for name in text.split(",") if name.strip()]
    if not names:
        return tuple(each for each in there if each.best or each == there[-1])
    chosen = [each for name in names for each in _named(run, there, name)]
    return tuple(each for each in there if each in chosen)


def choose_adapter(run: RunFolder, wanted: str) -> SavedAdapter:
    """Returns the one adapter that `wanted` names; "": the best, or the last where none was evaluated.

    Raises UserError for one that the run does not have.
    """
    chosen = choose_adapters(run, [wanted] if wanted else [])
    return next((each for each in chosen if each.best), chosen[-1])


def _named(run: RunFolder, there: Sequence[SavedAdapter], name: str) -> Sequence[SavedAdapter]:
    if name == "all":
        return there
    if name == "last":
        return there[-1:]
    found = [each for each in there if (each.best if name == "best" else str(each.step) == name.lstrip("0"))]
    if not found:
        steps = ", ".join(str(each.step) for each in there if each.step is not None)
        what = "no evaluated checkpoint" if name == "best" else f"no checkpoint {name!r}"
        raise UserError(
            f'{run.path} has {what}; it has {"steps " + steps if steps else "its final adapter"}, or "last".'
        )
    return found


def _final_step(run: RunFolder) -> int | None:
    """The last step of a run that has ended, by its summary."""
    with suppress(OSError, ValueError):
        step = read_json(run.metrics_json).get("steps")
        return step if isinstance(step, int) else None
    return None
