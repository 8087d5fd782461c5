"""The saves of a run: the state for --resume, checkpoints, and the final adapter. Only the coordinator saves."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlxdist.coordinator.config.schema import RunConfig, as_json
from mlxdist.coordinator.export import export_adapter
from mlxdist.coordinator.report.reporter import Reporter
from mlxdist.coordinator.report.summary import Results
from mlxdist.coordinator.storage.adapter_files import applied_ranks
from mlxdist.coordinator.storage.checkpoints import link_best, list_checkpoints, prune_checkpoints, save_checkpoint
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.coordinator.training.initial_adapter import tensors_of
from mlxdist.coordinator.training.state import State, save_state
from mlxdist.coordinator.training.validation import Evaluation
from mlxdist.protocol.errors import SaveError
from mlxdist.protocol.manifest import Manifest

SHARE_OF_TIME = 0.01  # what save_every = "auto" may cost
RETRY_SECONDS = 10.0  # between tries to save a run that has taken all its steps …
PATIENCE_SECONDS = 12 * 3600.0  # … for so long: a person who sleeps can still free some space in the morning


@dataclass
class Saver:
    """Writes into one run folder. A failed write does not stop the training: it is tried again.

    `identity`: what the state belongs to, and is compared with when the run is resumed. The last try's cost decides
    when "auto" saves again.
    """

    folder: RunFolder
    config: RunConfig
    manifest: Manifest
    identity: Mapping[str, object]
    report: Reporter
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    saved_step: int = -1
    _tried_at: float = float("-inf")
    _cost_seconds: float = 0.0
    _failed: bool = False
    _best_unsaved: tuple[State, Evaluation] | None = None

    def save_if_due(self, state: State, last: bool) -> None:
        """Saves the state every `save_every` steps; "auto": whenever that takes under 1 % of the time since the last.

        After a failure it is due as with "auto".
        """
        every = self.config.train.save_every
        if every == "auto" or self._failed:
            due = self._cost_seconds <= SHARE_OF_TIME * (self.clock() - self._tried_at)
        else:
            due = state.step % int(every) == 0
        if not due and not last:
            return
        try:
            self.save(state)
        except SaveError as error:
            self.report.could_not_save("state", error)

    def save(self, state: State) -> None:
        """Saves the state of the last whole step, once, and a best checkpoint that could not be written before.

        Raises SaveError; the state saved before is kept then.
        """
        if state.step > self.saved_step:  # an interrupt may come between a save and the end of its step
            began = self.clock()
            self.report.sync()
            self._failed = True
            try:
                save_state(self.folder, state, self.identity)
            finally:
                self._tried_at = self.clock()
                self._cost_seconds = self._tried_at - began
            self.saved_step, self._failed = state.step, False
            self.report.saved("state")
        if self._best_unsaved is not None:
            self._checkpoint(*self._best_unsaved)

    def checkpoint(self, state: State, evaluation: Evaluation | None) -> None:
        """Saves a loadable adapter folder for an evaluated (or just reached) step, links the best, drops old ones.

        A checkpoint that cannot be written is left out; the best one is kept in memory until it can.
        """
        try:
            self._checkpoint(state, evaluation)
        except SaveError as error:
            if evaluation is not None and evaluation.is_best:
                self._best_unsaved = (state, evaluation)
            self.report.could_not_save("checkpoint", error)

    def _checkpoint(self, state: State, evaluation: Evaluation | None) -> None:
        loss = evaluation.loss if evaluation is not None else None
        path = save_checkpoint(self.folder, state.step, loss, lambda folder: self._export(folder, state))
        is_best = evaluation is not None and evaluation.is_best
        if is_best:
            link_best(self.folder, path)
            self._best_unsaved = None
        prune_checkpoints(self.folder, self.config.train.keep_checkpoints)
        self.report.saved("checkpoint")
        self.report.checkpoint(state.step, path, best=is_best)

    def final(self, state: State) -> None:
        """Writes the last state, the run's adapter (loadable by mlx_lm.load(adapter_path=...)) and its summary.

        Tries for `PATIENCE_SECONDS`, as only this process holds the trained adapter; then raises SaveError.
        """
        give_up, waited = self.clock() + PATIENCE_SECONDS, False
        while True:
            try:
                self.save(state)
                self._export(self.folder.path, state)
                self.report.write_summary("done", self.results())
            except SaveError as error:
                if self.clock() >= give_up:
                    raise
                if not waited:
                    hours = f"{PATIENCE_SECONDS / 3600:.0f} hours"
                    self.report.note(
                        f"{error.what} All steps are done, and their adapter is kept in memory: writing is tried every "
                        f"{RETRY_SECONDS:.0f} s for {hours}; {error.cure}."
                    )
                waited = True
                self.sleep(RETRY_SECONDS)
            else:
                return

    def results(self) -> Results:
        """Returns the part of the summary that stands in the folder: settings, LoRA ranks, checkpoints."""
        ranks = applied_ranks({tensor.name: tensor.shape for tensor in self.manifest})
        checkpoints = [checkpoint.path for checkpoint in list_checkpoints(self.folder)]
        return Results(as_json(self.config), ranks, checkpoints)

    def _export(self, folder: Path, state: State) -> None:
        export_adapter(
            folder,
            tensors_of(self.manifest, state.adapter),
            base_model=self.config.model,
            num_layers=self.config.lora.num_layers,
            scale=self.config.lora.scale,
            dropout=self.config.lora.dropout,
        )
