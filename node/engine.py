"""Turns a session's work into answers: the worker's day without its process, threads and socket."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlxdist.node import model as models
from mlxdist.node.compute import Computer, RowNumbers, add
from mlxdist.node.model import LoadedModel
from mlxdist.node.session import ComputeCanary, ComputeLeaves, LoadModel, Session, Work
from mlxdist.node.strain import SwapWatch, named_out_of_memory
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol import messages as m
from mlxdist.protocol import numerics
from mlxdist.protocol.errors import MismatchError, MlxdistError, NonFiniteError, UserError
from mlxdist.protocol.leaves import Leaf
from mlxdist.protocol.tree import Span, fold_span, subtrees
from mlxdist.protocol.vectors import Vector
from mlxdist.protocol.wire import Buffer

Say = Callable[[m.Message, Buffer], None]
Offer = Callable[[m.Task, Span, Vector], None]


def versions() -> dict[str, str]:
    """The packages that must be the same on all nodes."""
    return {name: metadata.version(name) for name in ("mlx", "mlx-lm")}


class _NotNeeded(Exception):  # noqa: N818 - nothing is wrong
    """The rest of an assignment is not needed any more."""


class Engine:
    """Keeps the model from one run to the next when the next one needs the same."""

    def __init__(self) -> None:
        self._computer: Computer | None = None
        self._swap = SwapWatch()

    def perform(self, work: Work, session: Session, say: Say, offer: Offer) -> None:
        """Do one piece of work, handing each result over when it is evaluated. A failure becomes a Fault message."""
        life = session.life
        try:
            match work:
                case LoadModel(spec=spec):
                    loaded = self._load(spec, lambda sentence: say(m.Progress(life, sentence), b""))
                    session.elements = manifests.size(loaded.manifest)
                    say(_introduction(life, loaded), b"")
                case ComputeCanary():
                    say(m.CanaryAnswer(life, tuple(self._ready().canary())), b"")
                case ComputeLeaves():
                    self._compute(work, session, say, offer)
        except _NotNeeded:
            return
        except UserError as error:
            say(m.Fault(life, "config", str(error)), b"")
        except MlxdistError as error:
            say(m.Fault(life, "error", str(error)), b"")

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
        task, life = work.task, session.life
        computer = replace(self._ready(), adapter=work.adapter, reference=work.reference)
        computer.use(work.adapter)
        clock, segment_size = time.monotonic(), computer.loaded.path.segment_size

        def answer(leaf: Leaf, numbers: RowNumbers) -> None:
            nonlocal clock
            now = time.monotonic()
            message = m.LeafAnswer(
                life=life,
                step=task.step,
                attempt=task.attempt,
                adapter_version=task.adapter_version,
                leaf=leaf.index,
                columns=numbers.shape[1],
                seconds=now - clock,
                peak_bytes=mx.get_peak_memory(),
            )
            if task.verb == "gradient" and (slow := self._swap.leaf(leaf, now - clock, segment_size)):
                say(m.Progress(life, slow), b"")
            clock = now
            say(message, np.ascontiguousarray(numbers).tobytes())

        @contextmanager
        def computing(leaf: Leaf) -> Iterator[None]:
            if not session.needed(task.attempt):
                raise _NotNeeded
            try:
                with named_out_of_memory(leaf, segment_size):
                    yield
            except NonFiniteError as error:
                say(_nonfinite(task, leaf, str(error)), b"")
                raise _NotNeeded from error

        def one(index: int) -> Vector:
            leaf, inputs = work.leaves[index - task.start], work.numbers[index - task.start]
            with computing(leaf):
                flat, numbers = computer.gradient(
                    leaf, step=task.step, loss=task.loss, scalars=task.scalars, inputs=inputs
                )
            answer(leaf, numbers)
            return flat

        if task.verb == "score":
            for leaf in work.leaves:
                with computing(leaf):
                    numbers = computer.score(leaf, task.parameters)
                answer(leaf, numbers)
            return
        for span in subtrees(task.total, Span(task.start, task.stop)):
            offer(task, span, fold_span(span, one, add))


def _nonfinite(task: m.Task, leaf: Leaf, reason: str) -> m.Fault:
    rows = tuple(row.row_id for row in leaf.rows)
    return m.Fault(task.life, "nonfinite", reason, task.step, task.attempt, leaf.index, rows)


def _introduction(life: m.Life, loaded: LoadedModel) -> m.Loaded:
    return m.Loaded(
        life=life,
        model_hash=loaded.model_hash,
        manifest=loaded.manifest,
        module_bits=loaded.module_bits,
        num_hidden_layers=loaded.num_hidden_layers,
        vocab_size=loaded.vocab_size,
        note="",
    )


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
