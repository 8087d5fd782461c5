"""When and what a run saves: the state for --resume, checkpoints, and the final adapter. Only rank 0 does."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlxdist.coordinator.adapter import tensors_of
from mlxdist.coordinator.checkpoints import link_best, list_checkpoints, prune_checkpoints, save_checkpoint
from mlxdist.coordinator.config import RunConfig
from mlxdist.coordinator.evaluate import Evaluation
from mlxdist.coordinator.export import export_adapter
from mlxdist.coordinator.report import Reporter
from mlxdist.coordinator.run_folder import RunFolder
from mlxdist.coordinator.state import State, save_state
from mlxdist.protocol.manifest import Manifest, identity

SHARE_OF_TIME = 0.01  # what save_every = "auto" may cost


@dataclass
class Saver:
    """Writes into one run folder. The last save's cost decides when "auto" saves again."""

    folder: RunFolder
    config: RunConfig
    manifest: Manifest
    numerics_id: str
    report: Reporter
    clock: Callable[[], float] = time.monotonic
    saved_step: int = -1
    _saved_at: float = float("-inf")
    _cost_seconds: float = 0.0

    def save_if_due(self, state: State, last: bool) -> None:
        """Save the state every `save_every` steps; "auto": whenever that takes under 1 % of the time since the last."""
        every = self.config.train.save_every
        if every == "auto":
            due = self._cost_seconds <= SHARE_OF_TIME * (self.clock() - self._saved_at)
        else:
            due = state.step % int(every) == 0
        if due or last:
            self.save(state)

    def save(self, state: State) -> None:
        """Save the state of the last whole step, once. Raises SaveError; the state saved before is kept then."""
        if state.step == self.saved_step:
            return
        began = self.clock()
        save_state(self.folder, state, {"numerics_id": self.numerics_id, "manifest": identity(self.manifest)})
        self.saved_step, self._saved_at = state.step, self.clock()
        self._cost_seconds = self._saved_at - began

    def checkpoint(self, state: State, evaluation: Evaluation | None) -> None:
        """Save a loadable adapter folder for an evaluated (or just reached) step, link the best, drop old ones."""
        loss = evaluation.loss if evaluation is not None else None
        path = save_checkpoint(self.folder, state.step, loss, lambda folder: self._export(folder, state))
        is_best = evaluation is not None and evaluation.is_best
        if is_best:
            link_best(self.folder, path)
        prune_checkpoints(self.folder, self.config.train.keep_checkpoints)
        self.report.checkpoint(state.step, path, best=is_best)

    def final(self, state: State) -> None:
        """Write the run's adapter, loadable by mlx_lm.load(adapter_path=...)."""
        self._export(self.folder.path, state)

    def applied_ranks(self) -> dict[str, int]:
        """The LoRA rank of every module."""
        return {
            tensor.name.removesuffix(".lora_a"): tensor.shape[-1] if len(tensor.shape) == 2 else tensor.shape[-2]
            for tensor in sorted(self.manifest, key=lambda tensor: tensor.name)
            if tensor.name.endswith(".lora_a")
        }

    def checkpoints(self) -> list[Path]:
        """The checkpoint folders there are, oldest first."""
        return [checkpoint.path for checkpoint in list_checkpoints(self.folder)]

    def _export(self, folder: Path, state: State) -> None:
        export_adapter(
            folder,
            tensors_of(self.manifest, state.adapter),
            base_model=self.config.model,
            num_layers=self.config.lora.num_layers,
            scale=self.config.lora.scale,
            dropout=self.config.lora.dropout,
        )
