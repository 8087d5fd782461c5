"""One assignment: its leaves one by one, each answered, and the partials over its whole subtrees.

On the whole graph a partial is offered when it is summed. In segments it is offered when the backward of its last leaf
begins, and leaves layer by layer while the lower segments compute.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import mlx.core as mx
import numpy as np

from mlxdist.node.link.outgoing import Growing
from mlxdist.node.link.session import ComputeLeaves
from mlxdist.node.work.compute import Computer, Inputs, RowOutputs, add
from mlxdist.node.work.memory_pressure import SwapWatch, named_out_of_memory
from mlxdist.node.work.streaming_sum import Rising
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import NonFiniteError
from mlxdist.protocol.leaves import Leaf
from mlxdist.protocol.tree import Span, fold_span, left_of_last, subtrees
from mlxdist.protocol.vectors import Vector
from mlxdist.protocol.wire import Buffer

T = TypeVar("T")
Say = Callable[[m.Message, Buffer], None]


class Offer(Protocol):
    """Hands a partial over: whole, or `growing`, and then through what is returned."""

    def __call__(self, task: m.Assignment, span: Span, vector: Vector, *, growing: bool = False) -> Growing:
        """Announce the sum over one subtree."""


class NotNeededError(Exception):
    """Nothing is wrong: the rest of an assignment is not needed any more, or was reported."""


@dataclass
class Assignment:
    """What one task asks for. `needed` says whether somebody still waits for it."""

    computer: Computer
    work: ComputeLeaves
    needed: Callable[[], bool]
    say: Say
    offer: Offer
    swap: SwapWatch
    _began: float = field(default_factory=time.monotonic)  # the leaf in work

    def run(self) -> None:
        """All of it. Raises NotNeededError where it ends early, NodeError when memory runs out."""
        task = self.work.task
        if task.verb == "score":
            for index in range(task.start, task.stop):
                self._computed(index, self._score)
            return
        for span in subtrees(task.total, Span(task.start, task.stop)):
            if self._segment_size:
                self._stream(span)
            else:
                self.offer(task, span, fold_span(span, self._gradient_of, add))

    @property
    def _segment_size(self) -> int:
        return self.computer.loaded.path.segment_size

    def _check(self) -> None:
        if not self.needed():
            raise NotNeededError

    def _computed(self, index: int, compute: Callable[[Leaf, Inputs], T]) -> T:
        """One leaf's work, unless nobody needs it; NaN or Inf is reported."""
        self._check()
        task = self.work.task
        leaf, inputs = self.work.leaves[index - task.start], self.work.row_inputs[index - task.start]
        try:
            with named_out_of_memory(leaf, self._segment_size):
                return compute(leaf, inputs)
        except NonFiniteError as error:
            self.say(m.Fault(task.session, "nonfinite", str(error), task.step, task.attempt, leaf.index), b"")
            raise NotNeededError from error

    def _score(self, leaf: Leaf, _: Inputs) -> None:
        self._answer(leaf, self.computer.score(leaf, self.work.task.parameters))

    def _gradient(self, leaf: Leaf, inputs: Inputs) -> Vector:
        task = self.work.task
        flat, row_outputs = self.computer.gradient(
            leaf, step=task.step, loss=task.loss, scalars=task.scalars, inputs=inputs
        )
        self._answer(leaf, row_outputs)
        return flat

    def _gradient_of(self, index: int) -> Vector:
        return self._computed(index, self._gradient)

    def _stream(self, span: Span) -> None:
        """The sum over one subtree, its last leaf by parts."""
        task, computer = self.work.task, self.computer
        lefts = [fold_span(left, self._gradient_of, add) for left in left_of_last(span)]
        rising = Rising(computer.loaded.manifest, lefts)
        streams: list[Growing] = []

        def begin() -> None:
            streams.append(self.offer(task, span, rising.vector, growing=True))

        def final(parts: dict[str, Vector]) -> None:
            self._check()
            streams[0].grow(rising.take(parts))

        def by_parts(leaf: Leaf, inputs: Inputs) -> None:
            try:
                row_outputs = computer.gradient_by_parts(
                    leaf, begin, final, step=task.step, loss=task.loss, scalars=task.scalars, inputs=inputs
                )
            except BaseException:
                for stream in streams:  # before the coordinator hears why
                    stream.withdraw()
                raise
            assert rising.ready == len(rising.vector)
            self._answer(leaf, row_outputs)  # before the partial counts
            streams[0].finish()

        self._computed(span.stop - 1, by_parts)

    def _answer(self, leaf: Leaf, row_outputs: RowOutputs) -> None:
        task, now = self.work.task, time.monotonic()
        seconds, self._began = now - self._began, now
        message = m.LeafAnswer(
            session=task.session,
            step=task.step,
            attempt=task.attempt,
            adapter_version=task.adapter_version,
            leaf=leaf.index,
            columns=row_outputs.shape[1],
            seconds=seconds,
            peak_bytes=mx.get_peak_memory(),
        )
        if task.verb == "gradient" and (slow := self.swap.leaf(leaf, seconds, self._segment_size)):
            self.say(m.Progress(task.session, slow), b"")
        self.say(message, np.ascontiguousarray(row_outputs).tobytes())
