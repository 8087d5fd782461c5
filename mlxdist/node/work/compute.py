"""The computations of a worker, without any wire: the scores and gradient sums of leaves, and the canary.

Shapes: B rows or pairs of a leaf.
"""

import hashlib
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxdist.node.backward import backward
from mlxdist.node.backward.events import Computing, Events, FinalPart, RowSums, gathered
from mlxdist.node.backward.supervised import Supervised
from mlxdist.node.link.jobs import RowInputs
from mlxdist.node.work.model import LoadedModel
from mlxdist.node.work.objective import Objective, by_branch, passes, seen, target_counts
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol import numerics
from mlxdist.protocol.errors import NonFiniteError
from mlxdist.protocol.leaves import Leaf
from mlxdist.protocol.messages import RunSpec
from mlxdist.protocol.methods import LABELS, METHODS, SFT, MethodSpec
from mlxdist.protocol.vectors import Vector

RowOutputs = npt.NDArray[np.float32]  # [rows or pairs, columns]
LeafParts = Generator[RowOutputs | dict[str, Vector] | Computing, None, None]


@dataclass(frozen=True)
class Computer:
    """A loaded model, the run that it serves, and the adapters of the assignment in work."""

    loaded: LoadedModel
    spec: RunSpec
    adapter: Vector = field(default_factory=lambda: np.empty(0, np.float32))
    reference: Vector | None = None  # the adapter of `reference = "initial"`; None: the base, all zeros

    def use(self, adapter: Vector) -> None:
        """Puts a flat adapter vector, in manifest order, into the model."""
        parts = manifests.split(self.loaded.manifest, adapter)
        self.loaded.use({name: mx.array(part) for name, part in parts.items()})

    def score(self, leaf: Leaf, parameters: str = "current") -> RowOutputs:
        """Returns the sums of the rows' log-probs over their targets, dropout off, float32 [rows or pairs, columns].

        `parameters`: current, reference, or current+reference. The columns are those of `MethodSpec.scores`.
        """
        batches = passes(leaf, self.loaded.packing)
        columns: list[mx.array] = []
        for side in parameters.split("+"):
            sums = self._score(batches) if side == "current" else self._reference_score(batches)
            columns += by_branch(sums, leaf.branches)
        return np.array(mx.stack(columns, axis=1), dtype=np.float32)

    def gradient_parts(
        self, leaf: Leaf, *, step: int, loss: str, scalars: Mapping[str, float], inputs: RowInputs
    ) -> LeafParts:
        """Builds a leaf's graph. Yields its row outputs (`MethodSpec.row_outputs`), then its grad_sum by tensor name.

        Each part is flat, float32, finite and final, the top layer first. In segments the first ones come before the
        lower layers' backward. `Computing` comes once: a good time to build the next leaf, if `known_before` allows.
        Raises NonFiniteError, naming the leaf and its rows, in place of the first event that holds NaN or Inf.
        """
        batches, asked = self._asked(leaf, loss, scalars, inputs)
        events = self._backward(batches, asked, numerics.dropout_key(self.spec.seed, step, leaf.index))
        return self._copied(events, asked, step, leaf)

    def known_before(self, inputs: RowInputs) -> bool:
        """Returns True when a leaf with these inputs can be built without computing reference log-probs first."""
        return not any(math.isnan(value) for name in self._method.reference for value in inputs[name])

    def _copied(self, events: Events, asked: Objective, step: int, leaf: Leaf) -> LeafParts:
        for event in events:
            out: RowOutputs | dict[str, Vector] | Computing
            finite = True
            match event:
                case Computing():
                    out = event
                case RowSums(sums=sums):
                    out = np.array(asked.row_outputs(sums), dtype=np.float32)
                    finite = bool(np.isfinite(out).all())
                case FinalPart(gradients=grads):
                    out = {name: np.array(grad.astype(mx.float32).reshape(-1)) for name, grad in grads.items()}
                    finite = all(np.isfinite(part).all() for part in out.values())
                    del grads
            del event  # what is handed on is a copy; mlx's arrays would wait for the next event
            if not finite:
                raise _not_finite(step, leaf)
            yield out
            del out

    def _asked(
        self, leaf: Leaf, loss: str, scalars: Mapping[str, float], inputs: RowInputs
    ) -> tuple[Sequence[Supervised], Objective]:
        batches = passes(leaf, self.loaded.packing)
        constants = dict(zip(self._method.reference, self._references(leaf, batches, loss, inputs), strict=True))
        if self._method.labels:
            constants[LABELS] = mx.array(list(inputs[LABELS]))
        return batches, Objective(self._method, loss, scalars, constants, target_counts(leaf))

    @property
    def _method(self) -> MethodSpec:
        return METHODS[self.spec.method]

    def _backward(self, batches: Sequence[Supervised], asked: Objective, dropout_key: int) -> Events:
        return backward.backward(
            self.loaded.model,
            batches,
            asked.total,
            head_chunk=self.spec.head_chunk,
            path=self.loaded.path,
            dropout_key=dropout_key,
        )

    def canary(self) -> Iterator[str]:
        """Yields the SHA-256 of the canary leaf's gradient and row sums, each time that it is computed."""
        leaf = numerics.canary_leaf(self.loaded.vocab_size, self.spec.max_length)
        self.use(numerics.canary_adapter(self.loaded.manifest))
        batches = passes(leaf, self.loaded.packing)
        plain = Objective(SFT, "", {}, {}, [])
        for _ in range(numerics.CANARY_TIMES):
            sums, grads = gathered(self._backward(batches, plain, dropout_key=0))
            parts = [np.array(grads[t.name].astype(mx.float32)).tobytes() for t in self.loaded.manifest]
            yield hashlib.sha256(b"".join(parts) + np.array(mx.concatenate(sums), np.float32).tobytes()).hexdigest()

    def _score(self, batches: Sequence[Supervised]) -> list[mx.array]:
        """Returns the row sums of each pass."""
        model, chunk, path = self.loaded.model, self.spec.head_chunk, self.loaded.path
        return [backward.score(model, batch, head_chunk=chunk, path=path) for batch in batches]

    def _reference_score(self, batches: Sequence[Supervised]) -> list[mx.array]:
        """Returns the same under the reference's adapter, in the same layout; the current adapter is restored."""
        self.use(np.zeros_like(self.adapter) if self.reference is None else self.reference)
        sums = self._score(batches)
        mx.eval(sums)
        self.use(self.adapter)
        return sums

    def _references(self, leaf: Leaf, batches: Sequence[Supervised], loss: str, inputs: RowInputs) -> list[mx.array]:
        """Returns the reference log-probs as the loss sees them: those sent, and the unknown ones computed."""
        names = self._method.reference
        known = [mx.array(list(inputs[name]), mx.float32) for name in names]
        if self.known_before(inputs):
            return known
        fresh = seen(loss, by_branch(self._reference_score(batches), leaf.branches), target_counts(leaf))
        return [mx.where(mx.isnan(old), new, old) for old, new in zip(known, fresh, strict=True)]


def _not_finite(step: int, leaf: Leaf) -> NonFiniteError:
    rows = ", ".join(str(row.row_id) for row in leaf.rows)
    return NonFiniteError(f"NaN or Inf in step {step}, leaf {leaf.index}, rows {rows}", leaf=leaf.index)


def add(left: Vector, right: Vector) -> Vector:
    """Returns the sum of two grad_sums, written into `left`.

    The CPU adds, as at the coordinator: a GPU may flush subnormals.
    """
    return np.add(left, right, out=left)
