"""Turns a session's work into answers: the worker's day without its process, threads and socket."""

from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import mlx.core as mx

from mlxdist.node.link.session import ComputeCanary, ComputeLeaves, LoadModel, Session, Work
from mlxdist.node.work import model as models
from mlxdist.node.work.assignment import Assignment, NotNeededError, Offer, Say
from mlxdist.node.work.compute import Computer
from mlxdist.node.work.memory_pressure import SwapWatch
from mlxdist.node.work.model import LoadedModel
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol import messages as m
from mlxdist.protocol import numerics
from mlxdist.protocol.errors import MismatchError, MlxdistError, UserError

__all__ = ["Engine", "Offer", "Say", "versions"]


def versions() -> dict[str, str]:
    """The packages that must be the same on all nodes."""
    return {name: metadata.version(name) for name in ("mlx", "mlx-lm")}


class Engine:
    """Keeps the model from one run to the next when the next one needs the same."""

    def __init__(self) -> None:
        self._computer: Computer | None = None
        self._swap = SwapWatch()

    def perform(self, work: Work, session: Session, say: Say, offer: Offer) -> None:
        """Do one piece of work, handing each result over when it is evaluated. A failure becomes a Fault message."""
        session_id = session.id
        try:
            match work:
                case LoadModel(spec=spec):
                    loaded = self._load(spec, lambda sentence: say(m.Progress(session_id, sentence), b""))
                    session.elements = manifests.size(loaded.manifest)
                    say(_introduction(session_id, loaded), b"")
                case ComputeCanary():
                    say(m.CanaryAnswer(session_id, tuple(self._ready().canary())), b"")
                case ComputeLeaves():
                    self._compute(work, session, say, offer)
        except NotNeededError:
            return
        except UserError as error:
            say(m.Fault(session_id, "config", str(error)), b"")
        except MlxdistError as error:
            say(m.Fault(session_id, "error", str(error)), b"")

    def _ready(self) -> Computer:
        assert self._computer is not None, "the coordinator sends work only after Loaded"
        return self._computer

    def _load(self, spec: m.RunSpec, progress: Callable[[str], None]) -> LoadedModel:
        if numerics.numerics_id(spec) != spec.numerics_id:
            raise MismatchError(
                f"this node's mlxdist (rules {numerics.SEMANTICS_VERSION}) would give other bits than the "
                "coordinator's: install the same mlxdist on both"
            )
        kept = self._computer
        if kept is not None and _load_key(kept.spec) == _load_key(spec):
            folder = Path(spec.model)
            if not folder.is_dir() or models.hash_model(folder) == kept.loaded.model_hash:
                progress("the model is still loaded")
                self._computer = replace(kept, spec=spec)
                return kept.loaded
        self._computer = None  # two models at once would not fit
        mx.clear_cache()
        loaded = models.load(spec, progress)
        self._computer = Computer(loaded, spec)
        return loaded

    def _compute(self, work: ComputeLeaves, session: Session, say: Say, offer: Offer) -> None:
        computer = replace(self._ready(), adapter=work.adapter, reference=work.reference)
        computer.use(work.adapter)
        Assignment(computer, work, lambda: session.needed(work.task.attempt), say, offer, self._swap).run()


def _introduction(session: m.SessionId, loaded: LoadedModel) -> m.Loaded:
    return m.Loaded(session, loaded.model_hash, loaded.manifest)


def _load_key(spec: m.RunSpec) -> tuple[object, ...]:
    """What decides the loaded model: equal keys can share it."""
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
    )
