"""While the device computes a leaf, the next one's graph is built: in its turn, without memory, and without a trace."""

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from msgspec.structs import replace as replace_struct

from mlxdist.coordinator.config.run_spec import run_spec
from mlxdist.node.backward.events import Events, FinalPart
from mlxdist.node.link.jobs import ComputeAssignment, Partial, Result, RowInputs
from mlxdist.node.work import model as models
from mlxdist.node.work.assignment import AssignmentRun
from mlxdist.node.work.compute import Computer, LeafParts
from mlxdist.node.work.memory_pressure import SwapWatch
from mlxdist.protocol import messages as m
from mlxdist.protocol.leaves import Leaf
from mlxdist.protocol.methods import DPO
from mlxdist.protocol.vectors import Vector
from tests.laws.memory_fleet import make_row
from tests.laws.model_folder import llama_folder
from tests.node.test_session import SESSION
from tests.node.test_streaming import drawn_adapter
from tests.processes.thread_nodes import config_of

LEAVES = 5  # not a power of two, so an assignment has more than one partial
LONG = 160  # tokens of a leaf, so that its arrays outweigh the gradients


@dataclass(frozen=True)
class Told(Computer):
    """Remembers when leaves are built and computed; the gradient of one leaf may be damaged."""

    order: list[tuple[str, int]] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)

    def gradient_parts(self, leaf: Leaf, **asked: Any) -> LeafParts:
        """Builds a leaf."""
        self.order.append(("built", leaf.index))
        return self._watched(leaf.index, super().gradient_parts(leaf, **asked))

    def _watched(self, index: int, parts: LeafParts) -> LeafParts:
        self.order.append(("computes", index))
        yield from parts
        self.order.append(("done", index))

    def _backward(self, batches: Any, asked: Any, dropout_key: int) -> Events:
        _, index = self.order[-1]
        events = super()._backward(batches, asked, dropout_key)
        return _damaged(events) if index in self.damaged else events


def _damaged(events: Events) -> Events:
    for event in events:
        if isinstance(event, FinalPart):
            event.gradients[next(iter(event.gradients))] *= float("nan")
        yield event


@pytest.fixture(scope="module", params=[0, 1, 2], ids=["whole", "segments of 1", "segments of 2"])
def computer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Told:
    folder: Path = llama_folder(tmp_path_factory.mktemp("ahead"), layers=4)
    spec = run_spec(config_of(folder, segment_size=request.param, rank=4))
    loaded = models.load_with_lora(spec, lambda sentence: None)
    told = Told(loaded, spec, drawn_adapter(loaded.manifest))
    told.use(told.adapter)
    return told


@pytest.fixture
def fresh(computer: Told) -> Iterator[Told]:
    yield computer
    computer.order.clear()
    computer.damaged.clear()


def leaves_of(count: int) -> tuple[Leaf, ...]:
    random = np.random.default_rng(7)
    rows = [make_row(index, random.integers(0, 50, LONG).tolist(), LONG // 2) for index in range(count)]
    return tuple(Leaf(index, (row,)) for index, row in enumerate(rows))


def results_of(
    computer: Computer, leaves: tuple[Leaf, ...], inputs: Sequence[RowInputs] = (), loss: str = "sft"
) -> Generator[Result, None, None]:
    """All leaves but the last of a step."""
    scalars = {"beta": 0.1, "label_smoothing": 0.0}
    task = m.Assignment(SESSION, "gradient", 1, 1, 0, 0, len(leaves), len(leaves) + 1, loss, "current", scalars)
    job = ComputeAssignment(task, leaves, tuple(inputs or [{}] * len(leaves)), computer.adapter, None)
    yield from AssignmentRun(computer, job, SwapWatch()).results()


def test_a_leaf_is_built_while_the_one_before_it_computes(fresh: Told) -> None:
    list(results_of(fresh, leaves_of(LEAVES)))
    place = {entry: number for number, entry in enumerate(fresh.order)}
    assert len(place) == len(fresh.order) == 3 * LEAVES
    for before, leaf in pairwise(range(LEAVES)):
        assert place["computes", before] < place["built", leaf] < place["done", before] < place["computes", leaf]


def test_a_leaf_whose_reference_is_not_known_waits_for_the_one_before_it(fresh: Told) -> None:
    """Its log-probs are computed before its loss is known, and would take memory beside the other leaf."""
    dpo = replace(fresh, spec=replace_struct(fresh.spec, method=DPO.name))
    pairs = tuple(Leaf(leaf.index, leaf.rows * 2, branches=2) for leaf in leaves_of(3))
    known, unknown = ([dict.fromkeys(DPO.reference, (value,))] for value in (-9.0, math.nan))
    list(results_of(dpo, pairs, known + unknown + known, "sigmoid"))
    place = {entry: number for number, entry in enumerate(fresh.order)}
    assert place["done", 0] < place["built", 1] < place["computes", 1] < place["built", 2] < place["done", 1]


def test_the_answers_and_partials_have_the_bits_of_leaves_built_each_in_its_turn(fresh: Told) -> None:
    leaves = leaves_of(LEAVES)
    ahead = list(partials(results_of(fresh, leaves)))
    in_turn = [vector for leaf in leaves for vector in partials(results_of(fresh, (leaf,)))]
    four = (in_turn[0] + in_turn[1]) + (in_turn[2] + in_turn[3])
    assert [vector.tobytes() for vector in ahead] == [four.tobytes(), in_turn[4].tobytes()]


def partials(results: Iterator[Result]) -> Iterator[Vector]:
    for result in results:
        if isinstance(result, Partial) and result.ready is None:
            yield result.vector.copy()


def test_a_leaf_that_is_not_finite_is_named_although_the_next_one_is_built(fresh: Told) -> None:
    fresh.damaged.append(1)
    *_, (fault, _) = (result for result in results_of(fresh, leaves_of(3)) if not isinstance(result, Partial))
    assert isinstance(fault, m.Fault)
    assert (fault.kind, fault.leaf) == ("nonfinite", 1)
    assert ("computes", 2) not in fresh.order


def test_an_assignment_needs_the_memory_of_its_largest_leaf(fresh: Told) -> None:
    leaves = leaves_of(3)
    one = peak_of(fresh, leaves[:1])
    together = Leaf(0, leaves[0].rows + leaves[1].rows)
    assert peak_of(fresh, (together,)) > 1.5 * one, "the arrays of two leaves at once would be seen"
    assert peak_of(fresh, leaves) < 1.15 * one


def peak_of(computer: Computer, leaves: tuple[Leaf, ...]) -> int:
    """Returns the most bytes of mlx beside the model while leaves are computed."""
    for result in results_of(computer, leaves):
        del result
    mx.clear_cache()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    for result in results_of(computer, leaves):
        del result
    return mx.get_peak_memory() - held


def test_an_assignment_that_is_closed_keeps_nothing_of_what_was_built(fresh: Told) -> None:
    list(results_of(fresh, leaves_of(1)))
    mx.clear_cache()
    held, call = mx.get_active_memory(), type(fresh.loaded.model.layers[0]).__call__
    results = results_of(fresh, leaves_of(3))
    next(result for result in results if not isinstance(result, Partial))  # the first leaf's answer
    assert ("built", 1) in fresh.order
    results.close()
    del results
    assert mx.get_active_memory() <= held
    assert type(fresh.loaded.model.layers[0]).__call__ is call
