"""One step, and one evaluation, of any method: its requests to the fleet, and the answers read by name.

Shapes: R rows or pairs of the whole step, leaf by leaf.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxdist.coordinator.batch.batch_order import Step, validation_step
from mlxdist.coordinator.batch.leaf_tokens import auto_leaf_tokens
from mlxdist.coordinator.batch.micro_batches import Cut, cut
from mlxdist.coordinator.batch.row_store import Rows
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.methods.reference_logps import References, Table, taken, unknown
from mlxdist.coordinator.methods.step_metrics import Metrics
from mlxdist.coordinator.schedule.rounds import Request
from mlxdist.protocol.errors import MlxdistError
from mlxdist.protocol.leaves import Leaf
from mlxdist.protocol.losses import PER_TOKEN_MEAN
from mlxdist.protocol.methods import LABELS, LOSS, METHODS, Column, Columns, MethodSpec, columns_of
from mlxdist.protocol.objectives import row_losses
from mlxdist.protocol.vectors import Vector

PLACES = 8  # rows of a leaf at fault that are named by file and line

LeafInputs = dict[int, dict[str, tuple[float, ...]]]  # the row inputs of each leaf, by leaf and column


@dataclass(frozen=True)
class StepAnswer:
    """The gradient sum of a step before any division, the weight to divide it by, and the metrics (`loss` is one).

    `references` are the reference log-probs that are known after the step.
    """

    grad_sum: Vector
    weight: int
    metrics: Metrics
    leaves: tuple[Leaf, ...]
    references: References


@dataclass(frozen=True)
class Scored:
    """Rows that were scored, leaf by leaf [R], and the values that hold for all of them."""

    order: Sequence[int]  # their places in the data
    leaves: tuple[Leaf, ...]
    columns: Columns  # the loss, log-probs as the loss sees them, labels
    weight: int  # that the sum of the losses is divided by
    scalars: Mapping[str, float]

    @property
    def targets(self) -> npt.NDArray[np.int64]:
        """The targets of each row [R, branches]: one number, or those of chosen and rejected."""
        counts = [int(row.targets.sum()) for leaf in self.leaves for row in leaf.rows]
        return np.array(counts, np.int64).reshape(len(self.order), -1)


@dataclass
class Method(ABC):
    """A training method over the rows of a run. A subclass has the metrics, and the scalars of its loss."""

    config: RunConfig
    rows: Rows
    valid: Rows | None

    @property
    def spec(self) -> MethodSpec:
        """The method's line in the table."""
        return METHODS[self.config.method]

    @property
    def loss(self) -> str:
        """The name of the loss; empty for a method with one loss only."""
        return self.config.preference.loss if self.spec.losses else ""

    @cached_property
    def leaf_tokens(self) -> int:
        """The tokens of a leaf. A run has a number in place of "auto" before it begins."""
        tokens = self.config.batch.leaf_tokens
        return auto_leaf_tokens(self.rows, self.config.batch, self.config.method) if tokens == "auto" else tokens

    @abstractmethod
    def metrics(self, columns: Columns, weight: int, scalars: Mapping[str, float]) -> Metrics:
        """Returns the metrics of a step from its row outputs, and its labels, [R] each."""

    def scalars(self, fleet: Fleet, rows: Rows, step: Step, adapter_version: int) -> dict[str, float]:
        """Returns the values of the loss that hold for the whole step. May ask the fleet for scores."""
        return {}

    def advice(self, metrics: Metrics) -> str | None:
        """Returns a sentence for the person, once, when a step shows that something goes wrong."""
        return None

    def unknown_references(self) -> References:
        """Returns the reference tables of a run that begins."""
        return unknown(len(self.rows), len(self.valid or ()), len(self.spec.reference))

    def gradient(self, fleet: Fleet, step: Step, adapter_version: int, references: References) -> StepAnswer:
        """Returns the gradient sum over the step's global batch under an adapter version.

        A row's reference log-probs are computed with its gradient at its first visit.
        """
        spec = self.spec
        scalars = self.scalars(fleet, self.rows, step, adapter_version)
        done = self._cut(self.rows, step)
        leaves, order = done.leaves, done.order
        labels = self._labels(self.rows, order)
        known = columns_of(spec.reference, taken(references.train, order))
        inputs = per_leaf(leaves, {**labels, **known})
        request = Request(
            "gradient",
            step.number,
            adapter_version,
            leaves,
            loss=self.loss,
            scalars=scalars,
            row_inputs=inputs,
            columns=spec.row_outputs,
        )
        with places_named(self.rows, order, leaves):
            grad_sum, answers = fleet.gradient(request)
        columns = {**columns_of(spec.row_outputs, np.concatenate(answers)), **labels}
        saved = forwards_saved(inputs, spec.reference)
        references = references.with_train(order, table_of(columns, spec.reference), saved)
        weight = self._weight(leaves)
        return StepAnswer(grad_sum, weight, self.metrics(columns, weight, scalars), leaves, references)

    def evaluate(
        self, fleet: Fleet, limit: int, adapter_version: int, references: References
    ) -> tuple[Metrics, References]:
        """Returns the metrics of the first `limit` validation rows, and the references that are known afterwards."""
        scored, references = self.score(fleet, limit, adapter_version, references)
        return self.metrics(scored.columns, scored.weight, scored.scalars), references

    def score(
        self, fleet: Fleet, limit: int, adapter_version: int, references: References
    ) -> tuple[Scored, References]:
        """Returns the first `limit` validation rows, scored, and the references that are known afterwards."""
        assert self.valid is not None
        spec, rows = self.spec, self.valid
        step = validation_step(rows.lengths, limit, spec.name, adapter_version)
        done = self._cut(rows, step)
        order, leaves = done.order, done.leaves
        scalars = self.scalars(fleet, rows, step, adapter_version)
        known = taken(references.valid, order)
        parameters = "current+reference" if np.isnan(known).any() else "current"
        answers = fleet.score(self._score_request(adapter_version, adapter_version, leaves, parameters))
        scores = columns_of(spec.scores(parameters), np.concatenate(answers))
        if parameters == "current":
            references = references.with_valid(order, known, known.size)
        else:
            references = references.with_valid(order, table_of(scores, spec.reference), 0)
        columns = {**scores, **columns_of(spec.reference, taken(references.valid, order))}
        if self.loss in PER_TOKEN_MEAN:
            columns |= per_token(columns, leaves, spec, PER_TOKEN_MEAN[self.loss])
        columns |= self._labels(rows, order)
        with mx.stream(mx.cpu):
            on_cpu = {name: mx.array(column) for name, column in columns.items()}
            columns[LOSS] = np.array(row_losses(spec.name, self.loss, on_cpu, scalars))
        return Scored(order, leaves, columns, self._weight(leaves), scalars), references

    def _score_request(self, step: int, adapter_version: int, leaves: tuple[Leaf, ...], parameters: str) -> Request:
        columns = self.spec.scores(parameters)
        return Request("score", step, adapter_version, leaves, parameters=parameters, columns=columns)

    def _cut(self, rows: Rows, step: Step) -> Cut:
        return cut(step, rows, self.leaf_tokens)

    def _weight(self, leaves: Sequence[Leaf]) -> int:
        if self.spec.weight == "token":
            return supervised_tokens(leaves)
        return sum(leaf.items for leaf in leaves)

    def _labels(self, rows: Rows, order: Sequence[int]) -> dict[str, Column]:
        """The column of the labels, where the method has one: 1 desirable, 0 undesirable."""
        return {} if rows.labels is None else {LABELS: rows.labels[order].astype(np.float32)}


def table_of(columns: Columns, names: Sequence[str]) -> Table:
    """Returns some columns side by side, [R, names]."""
    some = [columns[name] for name in names]
    return np.stack(some, axis=1) if some else np.empty((0, 0), np.float32)


def per_token(columns: Columns, leaves: Iterable[Leaf], spec: MethodSpec, branches: int) -> dict[str, Column]:
    """Returns row sums [R] of log-probabilities as means over the targets of a row, those of the first branches."""
    targets = [row.targets.sum() for leaf in leaves for row in leaf.rows]
    counts = np.array(targets, np.float32).reshape(-1, spec.branches).T
    sides = [*zip(spec.policy, counts[:branches], strict=False), *zip(spec.reference, counts, strict=False)]
    return {name: columns[name] / count for name, count in sides}


def per_leaf(leaves: Iterable[Leaf], columns: Columns) -> LeafInputs:
    """Returns columns [R] cut into each leaf's inputs of the loss."""
    inputs, start = {}, 0
    for leaf in leaves:
        stop = start + leaf.items
        inputs[leaf.index] = {name: tuple(map(float, values[start:stop])) for name, values in columns.items()}
        start = stop
    return inputs


def forwards_saved(inputs: LeafInputs, names: Sequence[str]) -> int:
    """Returns the forwards of rows that a step did without: in leaves all of whose reference log-probs are known."""
    leaves = [[value for name in names for value in leaf[name]] for leaf in inputs.values()]
    return sum(len(values) for values in leaves if not any(map(math.isnan, values)))


@contextmanager
def places_named(rows: Rows, order: Sequence[int], leaves: Sequence[Leaf]) -> Iterator[None]:
    """Adds file and line of a leaf's rows to an error that this leaf caused. `order` [R]: the rows of `leaves`."""
    try:
        yield
    except MlxdistError as error:
        if error.leaf is None:
            raise
        start = sum(leaf.items for leaf in leaves[: error.leaf])
        mine = order[start : start + leaves[error.leaf].items]
        places = ", ".join(rows.where(index) for index in mine[:PLACES])
        more = f" and {len(mine) - PLACES} more" if len(mine) > PLACES else ""
        raise type(error)(f"{error}. The leaf holds {places}{more}", leaf=error.leaf) from error


def supervised_tokens(leaves: Iterable[Leaf]) -> int:
    """Returns the number of targets of all rows."""
    return sum(int(row.targets.sum()) for leaf in leaves for row in leaf.rows)


def all_tokens(leaves: Iterable[Leaf]) -> int:
    """Returns the number of tokens of all rows, without padding."""
    return sum(len(row.ids) for leaf in leaves for row in leaf.rows)
