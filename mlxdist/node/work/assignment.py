"""One assignment: its leaves one by one, each answered, and the partials over its whole subtrees.

On the whole graph a partial is yielded when it is summed. In segments it is yielded from the start of its last leaf's
backward on, so that its blocks leave layer by layer while the lower segments compute.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlxdist.node.backward.events import Computing
from mlxdist.node.link.jobs import ComputeAssignment, Partial, Result, RowInputs
from mlxdist.node.work.compute import Computer, LeafParts, RowOutputs, add
from mlxdist.node.work.memory_pressure import SwapWatch, named_out_of_memory
from mlxdist.node.work.streaming_sum import StreamingSum
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import NonFiniteError
from mlxdist.protocol.leaves import Leaf
from mlxdist.protocol.tree import Span, TreeSum, left_of_last, subtrees
from mlxdist.protocol.vectors import Vector


@dataclass
class AssignmentRun:
    """The work on one assignment, for as long as its results are taken."""

    computer: Computer
    job: ComputeAssignment
    swap: SwapWatch
    _began: float = field(default_factory=time.monotonic)  # of the leaf in work
    _next: LeafParts | None = None  # the leaf after it, built while the device computes

    def results(self) -> Iterator[Result]:
        """Yields answers and partials; the last is a Fault where a leaf holds NaN or Inf.

        Raises NodeError when memory runs out.
        """
        asked = self.job.assignment
        try:
            if asked.verb == "score":
                for index in range(asked.start, asked.stop):
                    leaf, _ = self._leaf(index)
                    with named_out_of_memory(leaf, self._segment_size):
                        row_outputs = self.computer.score(leaf, asked.parameters)
                    yield from self._answer(leaf, row_outputs)
            else:
                for span in subtrees(asked.total, Span(asked.start, asked.stop)):
                    yield from self._partial(span)
        except NonFiniteError as error:
            yield self._fault(error), b""

    def _fault(self, error: NonFiniteError) -> m.Fault:
        assert error.leaf is not None, "a computer names the leaf"
        asked = self.job.assignment
        return m.Fault(asked.session, "nonfinite", str(error), asked.step, asked.attempt, error.leaf)

    @property
    def _segment_size(self) -> int:
        return self.computer.loaded.path.segment_size

    def _leaf(self, index: int) -> tuple[Leaf, RowInputs]:
        place = index - self.job.assignment.start
        return self.job.leaves[place], self.job.row_inputs[place]

    def _parts(self, index: int) -> Iterator[RowOutputs | dict[str, Vector]]:
        """Yields one leaf's row outputs, then its grad_sum in parts. Meanwhile the next leaf is built."""
        parts = self._next or self._built(index)
        self._next = None
        with named_out_of_memory(self._leaf(index)[0], self._segment_size):
            for part in parts:
                if not isinstance(part, Computing):
                    yield part
                elif index + 1 < self.job.assignment.stop and self.computer.known_before(self._leaf(index + 1)[1]):
                    self._next = self._built(index + 1)
                del part  # it would wait for the next one

    def _built(self, index: int) -> LeafParts:
        """Builds one leaf's graph, which is computed when its parts are taken."""
        asked, (leaf, inputs) = self.job.assignment, self._leaf(index)
        with named_out_of_memory(leaf, self._segment_size):
            return self.computer.gradient_parts(
                leaf, step=asked.step, loss=asked.loss, scalars=asked.scalars, inputs=inputs
            )

    def _partial(self, span: Span) -> Iterator[Result]:
        """Yields the answers of one subtree's leaves and the sum over it, the last leaf added part by part."""
        sums: TreeSum[Vector] = TreeSum(len(span), add)
        for place, index in enumerate(range(span.start, span.stop)):
            last = place == len(span) - 1
            lefts = [sums.held[left] for left in left_of_last(Span(0, len(span)))] if last else []
            total = StreamingSum(self.computer.loaded.manifest, lefts)
            for event in self._parts(index):
                if isinstance(event, dict):
                    total.add(event)
                else:
                    row_outputs = event
                del event
                if last and self._segment_size:
                    yield Partial(self.job.assignment, span, total.vector, total.ready)
            assert total.ready == len(total.vector)
            yield from self._answer(self._leaf(index)[0], row_outputs)  # before the partial counts
            if last:
                yield Partial(self.job.assignment, span, total.vector)
            else:
                sums.put(Span(place, place + 1), total.vector)

    def _answer(self, leaf: Leaf, row_outputs: RowOutputs) -> Iterator[Result]:
        """Yields the answer to one leaf, after a sentence where swapping slowed it down."""
        asked, now = self.job.assignment, time.monotonic()
        seconds, self._began = now - self._began, now
        message = m.LeafAnswer(
            session=asked.session,
            step=asked.step,
            attempt=asked.attempt,
            adapter_version=asked.adapter_version,
            leaf=leaf.index,
            columns=row_outputs.shape[1],
            seconds=seconds,
            peak_bytes=mx.get_peak_memory(),
        )
        if asked.verb == "gradient" and (slow := self.swap.leaf(leaf, seconds, self._segment_size)):
            yield m.Progress(asked.session, slow), b""
        yield message, np.ascontiguousarray(row_outputs).tobytes()
