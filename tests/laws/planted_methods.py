"""The bugs of `planted_bugs`, planted into the trainer itself: wrong methods, rows, reference tables and workers.

Each takes the place of the right one where the trainer is given it: the loop its method, the method its rows and its
table, an engine its computer. The laws must fail on every one of them.
"""

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from mlxdist.coordinator.batch.batch_order import Step
from mlxdist.coordinator.batch.micro_batches import cut_kl
from mlxdist.coordinator.batch.row_store import PairedRows, StoredRows
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.methods.kinds import Dpo, Kto
from mlxdist.coordinator.methods.method import Method, StepAnswer
from mlxdist.coordinator.methods.reference_logps import References, Table
from mlxdist.coordinator.schedule.rounds import Request
from mlxdist.coordinator.training.startup import method_of
from mlxdist.node.backward.full_graph import forward_row_sums
from mlxdist.node.backward.packing import packed
from mlxdist.node.backward.supervised import Supervised
from mlxdist.node.link.jobs import RowInputs
from mlxdist.node.work.compute import Computer
from mlxdist.node.work.objective import by_branch, seen, target_counts
from mlxdist.protocol.leaves import Leaf, Row
from mlxdist.protocol.objectives import reference_point
from tests.coordinator.training.watched import Watched
from tests.laws.plain_model import set_dropout
from tests.laws.planted_bugs import node_parts
from tests.laws.preference_runs import MakeMethod

# ---- methods that see a step as nodes do, and not as one batch


def parts_of(step: Step) -> list[Step]:
    """The part of a step that each of two nodes has, as steps of their own: no step is asked for two gradients."""
    rows = tuple(step.rows)
    parts = enumerate(node_parts(len(rows)), start=1)
    return [Step(1000 * place + step.number, (rows[part],)) for place, part in parts]


def from_parts(
    method: Dpo | Kto, fleet: Fleet, step: Step, adapter_version: int, references: References, *, means: bool = False
) -> StepAnswer:
    """The right metrics, with a gradient that is put together of the nodes' own: their sums, or their means."""
    kind = Dpo if isinstance(method, Dpo) else Kto
    right = kind.gradient(method, fleet, step, adapter_version, references)  # type: ignore[arg-type]
    total, parts = np.zeros_like(right.grad_sum), parts_of(step)
    for part in parts:
        own = kind.gradient(method, fleet, part, adapter_version, right.references)  # type: ignore[arg-type]
        total = total + own.grad_sum * np.float32(right.weight / len(parts) / own.weight if means else 1.0)
    return replace(right, grad_sum=total)


class MeanOfMeans(Dpo):
    """Each node divides by its own pairs, and then they average."""

    def gradient(self, fleet: Fleet, step: Step, adapter_version: int, references: References) -> StepAnswer:
        """The parts' means."""
        return from_parts(self, fleet, step, adapter_version, references, means=True)


class PartsInOrder(Dpo):
    """The right sum, added up node by node instead of by the canonical tree."""

    def gradient(self, fleet: Fleet, step: Step, adapter_version: int, references: References) -> StepAnswer:
        """The parts' sums."""
        return from_parts(self, fleet, step, adapter_version, references)


class OwnReferencePoints(Kto):
    """Each node takes its reference point from its own rows."""

    def gradient(self, fleet: Fleet, step: Step, adapter_version: int, references: References) -> StepAnswer:
        """The parts' sums."""
        return from_parts(self, fleet, step, adapter_version, references)


class RollsWithinNodes(Kto):
    """KL pairs are made of what one node has; their mean is global."""

    def _reference_point(self, fleet: Fleet, rows: PairedRows, step: Step, adapter_version: int) -> float:
        scores = [kl_scores(self, fleet, rows, part, adapter_version) for part in parts_of(step)]
        return reference_point(*np.concatenate(scores).T)


class RollsWithinWindows(Kto):
    """KL pairs are made of the rows of one window."""

    def _reference_point(self, fleet: Fleet, rows: PairedRows, step: Step, adapter_version: int) -> float:
        windows = [Step(step.number, (window,)) for window in step.windows]
        return reference_point(*np.concatenate([kl_scores(self, fleet, rows, w, adapter_version) for w in windows]).T)


class NotClamped(Kto):
    """A negative reference point is used as it is."""

    def _reference_point(self, fleet: Fleet, rows: PairedRows, step: Step, adapter_version: int) -> float:
        policy, ref = kl_scores(self, fleet, rows, step, adapter_version).T
        return float((policy - ref).mean())


def kl_scores(method: Kto, fleet: Fleet, rows: PairedRows, step: Step, adapter_version: int) -> Table:
    """Policy and reference log-probs of a step's KL pairs, [R, 2]."""
    leaves = cut_kl(step, rows, method.leaf_tokens).leaves
    request = Request("score", step.number, adapter_version, leaves, parameters="current+reference")
    return np.concatenate(fleet.score(request))


# ---- rows and tables


class MaskOneEarly(StoredRows):
    """Counts the prompt's last token, and not the row's."""

    def rows(self, index: int) -> tuple[Row, ...]:
        """The rows with their targets one place to the left."""
        return tuple(
            Row(row.row_id, row.ids, np.append(row.targets[1:], np.uint8(0)) if row.targets[2:].any() else row.targets)
            for row in super().rows(index)
        )


class Forgetful(References):
    """Every row is unknown again at its next visit."""

    def with_train(self, rows: Sequence[int], values: Table, saved: int) -> References:
        """The same: nothing is kept, and nothing saved."""
        assert saved == 0
        return self


def with_mask_one_early(config: RunConfig, rows: StoredRows, valid: StoredRows | None) -> Method:
    """A method over rows whose mask is off by one."""
    return method_of(config, MaskOneEarly(rows._store), valid)


def forgetful_of(references: References) -> References:
    """References that forget."""
    return Forgetful(references.train, references.valid)


def made(kind: type[Dpo] | type[Kto]) -> MakeMethod:
    """A function that makes this variant of a method."""

    def make(config: RunConfig, rows: StoredRows, valid: StoredRows | None) -> Method:
        return kind(config, rows, valid)

    return make


# ---- workers


class ReferenceWithDropout(Computer):
    """The reference is asked in training mode, with dropout."""

    def _reference_score(self, batches: Sequence[Supervised]) -> list[mx.array]:
        self.use(np.zeros_like(self.adapter) if self.reference is None else self.reference)
        set_dropout(self.loaded.model, 0.3)
        self.loaded.model.train()
        mx.random.seed(0)
        chunk, alone = self.spec.head_chunk, self.loaded.path.supervised_head
        (batch,) = batches
        with packed(self.loaded.model, batch.packing):
            sums = [forward_row_sums(self.loaded.model, batch, head_chunk=chunk, supervised_head=alone)]
        set_dropout(self.loaded.model, 0.0)
        self.use(self.adapter)
        return sums


class ReferenceLeftInPlace(Computer):
    """The policy's adapter is not put back after the reference was asked."""

    def _reference_score(self, batches: Sequence[Supervised]) -> list[mx.array]:
        sums = super()._reference_score(batches)
        self.use(np.zeros_like(self.adapter) if self.reference is None else self.reference)
        return sums


class ReferenceIsThePolicy(Computer):
    """The reference is asked under the policy's parameters."""

    def _reference_score(self, batches: Sequence[Supervised]) -> list[mx.array]:
        return self._score(batches)


class ReferenceOfNoAdapter(Computer):
    """The reference's adapter, though sent, is not used."""

    def _reference_score(self, batches: Sequence[Supervised]) -> list[mx.array]:
        self.use(np.zeros_like(self.adapter))
        sums = self._score(batches)
        self.use(self.adapter)
        return sums


class AllFresh(Computer):
    """All references of a leaf are computed again when one of them is unknown."""

    def _references(self, leaf: Leaf, batches: Sequence[Supervised], loss: str, inputs: RowInputs) -> list[mx.array]:
        return seen(loss, by_branch(self._reference_score(batches), leaf.branches), target_counts(leaf))


class Miscounting(Watched):
    """An engine whose computer is of another kind."""

    def __init__(self, kind: type[Computer] = Computer) -> None:
        super().__init__()
        self.kind = kind

    def _ready(self) -> Computer:
        right = super()._ready()
        return self.kind(right.loaded, right.spec, right.adapter, right.reference)
