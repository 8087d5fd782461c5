"""DPO and KTO in one process, and the same by the plain loop, for the preference laws to compare."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model

from mlxdist.coordinator.batch.batch_order import Step, steps
from mlxdist.coordinator.batch.row_store import RowStore, StoredRows, pack
from mlxdist.coordinator.config.schema import (
    BatchConfig,
    DataConfig,
    LoraConfig,
    PreferenceConfig,
    RunConfig,
    TrainConfig,
)
from mlxdist.coordinator.methods.method import Method
from mlxdist.coordinator.methods.reference_logps import References, Table
from mlxdist.coordinator.train import Run, train
from mlxdist.coordinator.training.adamw import no_moments
from mlxdist.coordinator.training.initial_adapter import draw
from mlxdist.coordinator.training.startup import method_of
from mlxdist.coordinator.training.state import State
from mlxdist.node.work.engine import Engine
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol.manifest import Manifest
from mlxdist.protocol.vectors import Vector
from tests.coordinator.training.watched import Recorder
from tests.laws import plain_model
from tests.laws.memory_fleet import memory_cluster
from tests.laws.plain_loops import Parts, PlainStep, Recipe, Trainer, plain_dpo, plain_kto
from tests.laws.plain_model import KtoRow, PlainRow
from tests.laws.planted_bugs import assert_same_training
from tests.memory_cluster import MemoryCluster

Pair = tuple[PlainRow, PlainRow]
Hook = Callable[[int, MemoryCluster], None]  # what happens before a step: (its number, the nodes)
MakeMethod = Callable[[RunConfig, StoredRows, StoredRows | None], Method]

RANK, SCALE = 4, 2.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: its rows and how they are cut, the loss, and where the adapter starts."""

    rows: Sequence[Pair] | Sequence[KtoRow]
    loss: str
    batch: BatchConfig
    valid: Sequence[Pair] | Sequence[KtoRow] = ()
    method: str = "dpo"
    reference: str = "base"
    beta: float = 0.1
    label_smoothing: float = 0.0
    weights: tuple[float, float] = (1.0, 1.0)  # desirable, undesirable
    total_steps: int = 5
    dropout: float = 0.0
    learning_rate: float = 2e-3
    fresh: bool = False  # lora_b is 0 at the start, else random
    bos_id: int | None = None
    audit: float = 0.0

    def config(self, model: Path) -> RunConfig:
        """As run.toml would have it."""
        preference = PreferenceConfig(
            loss=self.loss,
            beta=self.beta,
            label_smoothing=self.label_smoothing,
            desirable_weight=self.weights[0],
            undesirable_weight=self.weights[1],
            reference=self.reference,  # type: ignore[arg-type]
        )
        train_config = TrainConfig(
            steps=self.total_steps,
            learning_rate=self.learning_rate,
            schedule="cosine",
            warmup_steps=1,
            eval_every=0,
            audit=self.audit,
        )
        return RunConfig(
            model=str(model),
            output=Path("none"),
            method=self.method,  # type: ignore[arg-type]
            data=DataConfig(path="none"),
            batch=self.batch,
            lora=LoraConfig(rank=RANK, scale=SCALE, dropout=self.dropout),
            train=train_config,
            preference=preference,
        )

    def stored(self, rows: Sequence[Pair] | Sequence[KtoRow]) -> StoredRows:
        """The rows as the data room keeps them."""
        store = RowStore("rows.jsonl", self.method, self.batch.max_length, self.bos_id)
        for line, row in enumerate(rows, start=1):
            if isinstance(row, KtoRow):
                parts = [pack(row.prompt, []), pack(row.completion, [(0, len(row.completion))])]
                store.add(line, parts, len(row.prompt) + len(row.completion), label=row.desirable)
            else:
                parts = [pack(one.ids, [(one.targets.index(1), len(one.ids))]) for one in row]
                if self.method == "orpo":
                    parts.append(pack(row[0].ids, [(0, len(row[0].ids))]))
                store.add(line, parts, max(len(one.ids) for one in row))
        return StoredRows(store)

    def order(self) -> list[Step]:
        """The steps of the run."""
        lengths = self.stored(self.rows).lengths.tolist()
        return list(islice(steps(lengths, self.batch, self.method), self.total_steps))

    def first_adapter(self, manifest: Manifest) -> Vector:
        """The adapter before the first step."""
        if self.fresh:
            return draw(manifest, seed=0)
        size = sum(int(np.prod(tensor.shape)) for tensor in manifest)
        return np.random.default_rng(11).uniform(-0.1, 0.1, size).astype(np.float32)


@dataclass(frozen=True)
class Ran:
    """The result of a run."""

    steps: list[PlainStep]
    state: State
    method: Method
    notes: list[str]

    @property
    def sha(self) -> str:
        """The bits of the last adapter."""
        return hashlib.sha256(self.state.adapter.tobytes()).hexdigest()


def train_here(
    case: Case,
    model: Path,
    engines: Sequence[Engine],
    *,
    make: MakeMethod = method_of,
    start: Callable[[Method], State] | None = None,
    knowing: Callable[[References], References] = lambda references: references,
    before: Hook = lambda step, nodes: None,
    recorder: Recorder | None = None,
    evaluate_before_each_step: bool = False,
) -> Ran:
    """Train with one node per engine.

    `make` may give a variant of the method, `start` another state to begin with, `knowing` other references.
    """
    config, told = case.config(model), recorder or Recorder()
    rows, valid = case.stored(case.rows), case.stored(case.valid) if case.valid else None
    with memory_cluster(config, engines) as (fleet, nodes):
        manifest = fleet.wait_for_model().manifest
        method = make(config, rows, valid)
        first = case.first_adapter(manifest)
        state = start(method) if start else State(first, no_moments(len(first)), method.unknown_references())
        state = replace(state, references=knowing(state.references))
        evaluated = state.references
        if case.reference == "initial":
            fleet.send_reference(first)
        fleet.send_adapter(state.step, state.adapter)
        fleet.wait_for_nodes(len(engines), len(engines), 0.0)

        def come(step: int) -> None:
            nonlocal evaluated
            before(step, nodes)
            if evaluate_before_each_step:
                _, evaluated = method.evaluate(fleet, len(case.valid), step - 1, evaluated)

        told.before = come
        come(state.step + 1)
        loop = Run(config, method, rows, told, case.total_steps, fleet, told, told)  # type: ignore[arg-type]
        state = train(loop, state)
    came_to = [
        PlainStep(dict(report.metrics), report.grad_norm, dict(manifests.split(manifest, s.adapter)))
        for report, s in zip(told.reports, told.states, strict=True)
    ]
    return Ran(came_to, state, method, told.notes)


def with_rows(references: References, values: Mapping[int, float | tuple[float, float]]) -> References:
    """The references, with these values at these training rows."""
    train: Table = references.train.copy()
    for row, value in values.items():
        train[row] = value
    return replace(references, train=train)


def train_plainly(
    case: Case, model: Path, parts: Parts | None = None, taken: Sequence[Sequence[Any]] | None = None
) -> list[PlainStep]:
    """The same run by the plain loop; `parts` may have a bug, `taken` replaces the rows of the steps."""
    plain = plain_model.with_lora(load_model(model)[0], rank=RANK, scale=SCALE)
    manifest = manifests.make({name: a.shape for name, a in plain_model.adapter_of(plain).items()})
    first = manifests.split(manifest, case.first_adapter(manifest))
    plain_model.use_adapter(plain, {name: mx.array(part) for name, part in first.items()})
    recipe = Recipe(
        learning_rate=case.learning_rate,
        schedule="cosine",
        warmup_steps=1,
        total_steps=case.total_steps,
        loss=case.loss,
        beta=case.beta,
        label_smoothing=case.label_smoothing,
        desirable_weight=case.weights[0],
        undesirable_weight=case.weights[1],
        reference=case.reference,
        max_length=case.batch.max_length,
        bos_id=case.bos_id,
    )
    trainer = Trainer(plain, recipe, parts or Parts())
    if taken is None:
        taken = [[case.rows[row] for row in step.rows] for step in case.order()]
    return plain_dpo(trainer, taken) if case.method == "dpo" else plain_kto(trainer, taken)


def assert_equals_one_machine(case: Case, model: Path, engines: Sequence[Engine], **how: Any) -> Ran:
    """Train on the nodes and by the plain loop, and compare every step."""
    ran = train_here(case, model, engines, **how)
    # discopop divides the margin by 0.05, and so multiplies float32's rounding by 20
    norm = 1e-4 if case.loss == "discopop" else None
    assert_same_training(ran.steps, train_plainly(case, model), norm=norm)
    return ran


def evaluate_here(case: Case, model: Path, engines: Sequence[Engine], *, times: int = 1) -> list[dict[str, float]]:
    """The metrics of the validation rows under the first adapter, so many times in a row."""
    config = case.config(model)
    method = method_of(config, case.stored(case.rows), case.stored(case.valid))
    with memory_cluster(config, engines) as (fleet, _):
        first = case.first_adapter(fleet.wait_for_model().manifest)
        if case.reference == "initial":
            fleet.send_reference(first)
        fleet.send_adapter(0, first)
        fleet.wait_for_nodes(len(engines), len(engines), 0.0)
        references, found = method.unknown_references(), []
        for _ in range(times):
            metrics, references = method.evaluate(fleet, len(case.valid), 0, references)
            found.append(metrics)
        return found
