"""What a worker computes, free of any wire: the scores and gradient sums of leaves, and the canary.

Shapes: B rows, L = width - 1 positions.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxdist.node import backward
from mlxdist.node.backward import MicroBatch
from mlxdist.node.model import LoadedModel
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol import numerics
from mlxdist.protocol.errors import NonFiniteError
from mlxdist.protocol.leaves import Leaf, Row
from mlxdist.protocol.messages import RunSpec
from mlxdist.protocol.tree import Span, fold_span
from mlxdist.protocol.vectors import Vector

RowNumbers = npt.NDArray[np.float32]  # [rows or pairs, columns]


@dataclass(frozen=True)
class Computer:
    """A loaded model and the run that it serves."""

    loaded: LoadedModel
    spec: RunSpec

    def use(self, adapter: Vector) -> None:
        """Put a flat adapter vector into the model."""
        parts = manifests.split(self.loaded.manifest, adapter)
        self.loaded.use({name: mx.array(part) for name, part in parts.items()})

    def score(self, leaf: Leaf) -> RowNumbers:
        """Per row the sum of its targets' log-probs, float32 [B, 1]; dropout off."""
        batch = micro_batch(leaf.rows, leaf.widths[0])
        sums = backward.score(self.loaded.model, batch, head_chunk=self.spec.head_chunk, path=self.loaded.path)
        return np.array(sums, dtype=np.float32)[:, None]

    def gradient(self, leaf: Leaf, step: int) -> tuple[mx.array, RowNumbers]:
        """The leaf's grad_sum as one flat float32 array in manifest order, and per row its log-prob sum [B, 1].

        Raises NonFiniteError, naming the leaf and its rows, when either holds NaN or Inf.
        """
        sums, grads = backward.gradient(
            self.loaded.model,
            [micro_batch(leaf.rows, leaf.widths[0])],
            lambda logps: -logps[0].sum(),
            head_chunk=self.spec.head_chunk,
            path=self.loaded.path,
            dropout_key=numerics.dropout_key(self.spec.seed, step, leaf.index),
        )
        flat = mx.concatenate([grads[t.name].astype(mx.float32).reshape(-1) for t in self.loaded.manifest])
        finite = mx.all(mx.isfinite(flat)) & mx.all(mx.isfinite(sums[0]))
        mx.eval(flat, sums, finite)
        if not finite.item():
            rows = ", ".join(str(row.row_id) for row in leaf.rows)
            raise NonFiniteError(f"NaN or Inf in step {step}, leaf {leaf.index}, rows {rows}")
        return flat, np.array(sums[0], dtype=np.float32)[:, None]

    def partial(
        self, span: Span, leaf_at: Callable[[int], Leaf], step: int, done: Callable[[Leaf, RowNumbers], None]
    ) -> Vector:
        """The grad_sum over one whole subtree, added in tree order; `done` is called after each leaf."""

        def one(index: int) -> mx.array:
            leaf = leaf_at(index)
            flat, numbers = self.gradient(leaf, step)
            done(leaf, numbers)
            return flat

        return np.array(fold_span(span, one, _add), dtype=np.float32)

    def canary(self) -> Iterator[str]:
        """SHA-256 of the canary leaf's gradient and row numbers, each time it is computed."""
        leaf = numerics.canary_leaf(self.loaded.vocab_size, self.spec.max_length)
        self.use(numerics.canary_adapter(self.loaded.manifest))
        for _ in range(numerics.CANARY_TIMES):
            flat, numbers = self.gradient(leaf, step=0)
            yield hashlib.sha256(np.array(flat, dtype=np.float32).tobytes() + numbers.tobytes()).hexdigest()


def micro_batch(rows: Sequence[Row], width: int) -> MicroBatch:
    """Rows right-padded to `width` tokens as inputs, targets and target mask, each [B, width - 1]."""
    ids = np.zeros((len(rows), width), np.int32)
    mask = np.zeros((len(rows), width), np.float32)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = row.ids
        mask[i, : len(row.ids)] = row.targets
    return MicroBatch(ids[:, :-1], ids[:, 1:], mask[:, 1:])


def _add(left: mx.array, right: mx.array) -> mx.array:
    total = left + right
    mx.eval(total)
    return total
