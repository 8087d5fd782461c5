"""From a session's jobs to their results: the worker without its process, threads and socket."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from mlxdist.node.link.jobs import ComputeAssignment, ComputeCanary, FetchModel, Job, JobResults, LoadModel, TakeBlock
from mlxdist.node.work import model as models
from mlxdist.node.work.assignment import AssignmentRun
from mlxdist.node.work.compute import Computer
from mlxdist.node.work.locate import Locator
from mlxdist.node.work.memory_pressure import SwapWatch
from mlxdist.node.work.model import LoadedModel
from mlxdist.protocol import messages as m
from mlxdist.protocol import numerics
from mlxdist.protocol.errors import MismatchError, MlxdistError, UserError


class Engine:
    """Does a worker's jobs, and keeps the model from one run to the next when the next one needs the same."""

    def __init__(self) -> None:
        self.locator = Locator()
        self._computer: Computer | None = None
        self._swap = SwapWatch()

    def perform(self, job: Job, session: m.SessionId, progress: Callable[[str], None]) -> JobResults:
        """Yields the results of one job, each when it is evaluated. A failure becomes a Fault message, the last result.

        Closing the generator ends the job. `progress` is called with sentences while a model is loaded.
        """
        try:
            match job:
                case LoadModel() | FetchModel() | TakeBlock():
                    if isinstance(job, LoadModel):
                        _check_rules(job.spec)
                    spec = yield from self.locator.locate(job, session)
                    if spec is not None:
                        loaded = self._load(spec, progress)
                        yield m.Loaded(session, loaded.model_hash, loaded.manifest, loaded.packing.mode), b""
                case ComputeCanary():
                    yield m.CanaryAnswer(session, tuple(self._ready().canary())), b""
                case ComputeAssignment():
                    computer = replace(self._ready(), adapter=job.adapter, reference=job.reference)
                    computer.use(job.adapter)
                    yield from AssignmentRun(computer, job, self._swap).results()
        except MlxdistError as error:
            kind = "config" if isinstance(error, UserError) else "error"
            yield m.Fault(session, kind, str(error)), b""

    def _ready(self) -> Computer:
        assert self._computer is not None, "the coordinator sends work only after Loaded"
        return self._computer

    def _load(self, spec: m.RunSpec, progress: Callable[[str], None]) -> LoadedModel:
        kept = self._computer
        if kept is not None and _load_key(kept.spec) == _load_key(spec):
            folder = Path(spec.model)
            if not folder.is_dir() or models.hash_model(folder) == kept.loaded.model_hash:
                progress("the model is still loaded")
                loaded = kept.loaded
                if spec.packing not in (kept.spec.packing, loaded.packing.mode):
                    loaded = models.packed_again(loaded, spec, progress)
                self._computer = replace(kept, loaded=loaded, spec=spec)
                return loaded
        self._computer = None  # two models at once would not fit
        mx.clear_cache()
        loaded = models.load_with_lora(spec, progress)
        self._computer = Computer(loaded, spec)
        return loaded


def _check_rules(spec: m.RunSpec) -> None:
    """Raises MismatchError where this node's mlxdist would give other bits than the coordinator's."""
    if numerics.numerics_id(spec) != spec.numerics_id:
        raise MismatchError(
            f"this node's mlxdist (rules {numerics.SEMANTICS_VERSION}) would give other bits than the "
            "coordinator's: install the same mlxdist on both"
        )


def _load_key(spec: m.RunSpec) -> tuple[object, ...]:
    """Returns what decides the loaded model: runs with equal keys can share it."""
    return (
        spec.model,
        spec.lora_rank,
        spec.lora_scale,
        spec.lora_dropout,
        spec.rank_scaling,
        spec.target_modules,
        spec.num_layers,
        spec.segment_size,
        spec.grad_checkpoint,
        spec.largest_leaf,
        spec.chunked,
    )
