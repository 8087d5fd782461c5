"""Gradients leave as they are made: earlier, and with the same bits; and nothing counts before it is whole."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxdist.node.backward.events import Events, FinalPart
from mlxdist.node.link.jobs import ComputeAssignment, Partial
from mlxdist.node.work.assignment import AssignmentRun
from mlxdist.node.work.compute import Computer, add
from mlxdist.node.work.engine import Engine
from mlxdist.node.work.memory_pressure import SwapWatch
from mlxdist.node.work.model import LoadedModel
from mlxdist.node.work.streaming_sum import StreamingSum
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol import messages as m
from mlxdist.protocol.leaves import Leaf
from mlxdist.protocol.manifest import Manifest
from mlxdist.protocol.transport import CONTROL
from mlxdist.protocol.tree import Span, fold, fold_span, left_of_last
from mlxdist.protocol.vectors import BLOCK_ELEMENTS, WINDOW, OutgoingVector, Vector, block_count, digest
from scripts.local_cluster import free_ports
from tests.coordinator.cluster.scripted_node import PARTIAL, Bench, give_back, working
from tests.faults.fault_proxy import DOWN, UP, Proxy
from tests.laws.model_folder import llama_folder
from tests.node.test_session import SESSION, Session, new_session, said, task_of, tell
from tests.node.wired_nodes import Wires
from tests.processes.thread_nodes import HERE, LEAVES, config_of, request, start_coordinator, thread_nodes

LAYERS = 3
RANK = 600  # with which every layer of the tiny llama fills a block


def random_vectors(count: int, elements: int) -> list[Vector]:
    """Values of very different sizes, so that the order of a sum is seen in its bits."""
    random = np.random.default_rng(elements)
    sizes = 10.0 ** random.integers(-4, 5, (count, elements))
    return list((random.standard_normal((count, elements)) * sizes).astype(np.float32))


# ---- the sum of a growing prefix

MANIFEST = manifests.make(
    {f"model.layers.{layer}.q.lora_{side}": (3, 5 + layer) for layer in range(4) for side in "ab"}
)


def parts_of(vector: Vector) -> dict[str, Vector]:
    return {name: part.reshape(-1) for name, part in manifests.split(MANIFEST, vector).items()}


@settings(max_examples=40)
@given(st.data())
def test_a_sum_that_grows_by_prefixes_has_the_bits_of_the_whole_tree(data: st.DataObject) -> None:
    leaves = data.draw(st.integers(1, 9))
    vectors = random_vectors(leaves, manifests.size(MANIFEST))
    span = Span(0, leaves)
    whole = fold(vectors, lambda left, right: left + right)
    lefts = [fold_span(left, lambda index: vectors[index].copy(), add) for left in left_of_last(span)]
    total = StreamingSum(MANIFEST, lefts)
    names = data.draw(st.permutations([tensor.name for tensor in MANIFEST]))
    parts, ready = parts_of(vectors[-1]), 0
    while names:
        taken = data.draw(st.integers(1, len(names)))
        total.add({name: parts[name] for name in names[:taken]})
        names, before, ready = names[taken:], ready, total.ready
        assert ready >= before
        assert total.vector[:ready].tobytes() == whole[:ready].tobytes()
    assert ready == len(whole)


def test_parts_in_the_order_of_the_manifest_are_final_at_once() -> None:
    (vector,) = random_vectors(1, manifests.size(MANIFEST))
    total, expected = StreamingSum(MANIFEST, []), 0
    for name, part in parts_of(vector).items():
        expected += len(part)
        total.add({name: part})
        assert total.ready == expected


def test_the_left_parts_of_a_subtree_are_all_but_its_last_leaf() -> None:
    for leaves in range(1, 40):
        spans = [*left_of_last(Span(3, 3 + leaves)), Span(2 + leaves, 3 + leaves)]
        assert [index for span in spans for index in range(span.start, span.stop)] == list(range(3, 3 + leaves))


def test_another_order_of_the_sum_would_be_seen() -> None:
    vectors = random_vectors(7, 1000)
    whole = fold(vectors, lambda left, right: left + right)
    assert sum(vectors[1:], vectors[0]).tobytes() != whole.tobytes()


# ---- blocks of a vector that grows

ELEMENTS = 3 * BLOCK_ELEMENTS + 5


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, ELEMENTS // 2), st.integers(0, WINDOW)), max_size=12))
def test_only_blocks_that_will_not_change_go_and_the_end_waits_for_the_whole(moves: list[tuple[int, int]]) -> None:
    final = np.arange(ELEMENTS, dtype=np.float32)
    vector = np.full(ELEMENTS, np.float32(-1))
    sender, ready = OutgoingVector(1, vector, ready=0), 0
    arrived: list[bytes] = []
    for more, window in [*moves, (ELEMENTS, 0), (0, ELEMENTS)]:
        vector[ready : ready + more] = final[ready : ready + more]
        ready = sender.ready = min(ready + more, ELEMENTS)
        sender.credit(len(arrived) + window)
        arrived += [bytes(block) for _, block in sender.blocks()]
        assert len(arrived) <= (block_count(ELEMENTS) if ready == ELEMENTS else ready // BLOCK_ELEMENTS)
        assert not sender.all_sent
    sender.ready = None
    assert sender.all_sent
    assert b"".join(arrived) == final.tobytes()
    assert sender.end() == digest(final)


# ---- a session's growing partial

TASK = task_of(0, 1)
BIG = 2 * BLOCK_ELEMENTS + 1


def growing(session: Session, vector: Vector) -> tuple[Callable[[int | None], bool], int]:
    """Offers a partial of which nothing is final; returns how it grows, and its stream."""

    def grow(ready: int | None) -> bool:
        return session.deliver(Partial(TASK, Span(0, 1), vector, ready))

    grow(0)
    (offer,) = said(session)
    assert isinstance(offer, m.VectorOffer)
    tell(session, (m.Credit(SESSION, offer.stream, 10), b""))
    return grow, offer.stream


def test_a_growing_partial_is_offered_at_once_and_sent_by_its_prefix() -> None:
    session, vector = new_session(), np.arange(BIG, dtype=np.float32)
    grow, number = growing(session, vector)
    assert said(session) == []
    grow(BLOCK_ELEMENTS - 1)
    assert said(session) == []
    grow(BLOCK_ELEMENTS)
    assert said(session) == [m.VectorBlock(SESSION, number, 0)]
    grow(BIG)
    assert said(session) == [m.VectorBlock(SESSION, number, index) for index in (1, 2)]
    assert session.uploading
    grow(None)
    (end,) = said(session)
    assert isinstance(end, m.VectorEnd)
    assert (end.stream, end.digest) == (number, digest(vector))
    assert end.grew > 0
    assert not session.uploading


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_the_answer_to_its_last_leaf_stands_before_the_end_whenever_the_carrier_looks(blocks: int) -> None:
    session, vector = new_session(), np.arange(BIG, dtype=np.float32)
    grow, number = growing(session, vector)
    grow(BIG)
    outgoing, kinds = session.take_outgoing(), []
    for _ in range(blocks):
        kinds.append(type(next(outgoing)[0]).__name__)
    session.say(m.Progress(SESSION, "the answer"))  # the computing thread goes on while a block travels
    grow(None)
    kinds += [type(message).__name__ for message, _ in outgoing]
    assert kinds == ["VectorBlock"] * blocks + ["Progress"] + ["VectorBlock"] * (3 - blocks) + ["VectorEnd"]
    assert number == 1


@pytest.mark.parametrize("end", ["withdrawn", "cancelled", "stale", "over"])
def test_a_partial_that_is_dropped_in_mid_stream_sends_nothing_more(end: str) -> None:
    session, vector = new_session(), np.arange(BIG, dtype=np.float32)
    grow, number = growing(session, vector)
    grow(2 * BLOCK_ELEMENTS)
    outgoing = session.take_outgoing()
    assert isinstance(next(outgoing)[0], m.VectorBlock)
    if end == "withdrawn":
        session.done()  # of a job that was closed early
    elif end == "cancelled":
        session.computing = TASK.attempt
        tell(session, (m.Cancel(SESSION, TASK.attempt), b""))
    elif end == "stale":
        tell(session, (m.Stale(SESSION, "another was faster", number), b""))
    else:
        tell(session, (m.Stale(SESSION, "a block", over=True), b""))
    assert list(outgoing) == []
    if end != "withdrawn":  # after which the job goes on for a while
        grow(BIG)
        grow(None)
    assert said(session) == []
    assert not session.uploading
    tell(session, (m.Received(SESSION, number, whole=False), b""))
    assert said(session) == []


def test_a_streamed_partial_that_arrived_damaged_is_offered_whole() -> None:
    session, vector = new_session(), np.arange(BIG, dtype=np.float32)
    grow, number = growing(session, vector)
    grow(BIG)
    grow(None)
    said(session)
    tell(session, (m.Received(SESSION, number, whole=False), b""))
    (offer,) = said(session)
    assert isinstance(offer, m.VectorOffer)
    tell(session, (m.Credit(SESSION, offer.stream, 10), b""))
    assert [type(message).__name__ for message in said(session)] == ["VectorBlock"] * 3 + ["VectorEnd"]


@pytest.mark.parametrize(
    ("offered", "credit", "grew", "ended", "took"),
    [
        (0.0, 0.0, 0.0, 3.0, 3.0),  # it was whole when it was offered
        (0.0, 0.0, 5.0, 5.5, 0.5),  # most of it left while it grew
        (0.0, 4.0, 5.0, 9.0, 4.0),
        (0.0, 7.0, 5.0, 9.0, 2.0),  # there was no room for it before
    ],
)
def test_a_links_seconds_are_those_after_the_last_leaf_was_computed(
    offered: float, credit: float, grew: float, ended: float, took: float
) -> None:
    bench = Bench()
    (node,) = working(bench, "only")
    start = bench.now
    bench.cluster.transfers.uploads.limit = bench.cluster.transfers.uploads.reserve = 0
    bench.now = start + offered
    node.say(node.offer(Span(0, 4)))
    bench.now = start + credit
    bench.cluster.transfers.uploads.limit = 2
    bench.cluster.now = bench.now
    give_back(bench.cluster, [])
    bench.collect()
    node.say(m.VectorBlock(node.session, 1, 0), PARTIAL.tobytes())
    bench.now = start + ended
    node.say(m.VectorEnd(node.session, 1, digest(PARTIAL), grew))
    assert bench.cluster.nodes["only"].speed.up == pytest.approx(took)


# ---- a model in segments


@pytest.fixture(scope="module")
def three_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("three"), layers=LAYERS)


@dataclass(frozen=True)
class Told(Computer):
    """Remembers which layers became final, in the record of the wires; may damage one of them."""

    record: list[tuple[str, int]] = field(default_factory=list)
    damage: list[tuple[int, int]] = field(default_factory=list)  # (leaf, layer), each once
    now: list[int] = field(default_factory=list)  # the leaf in work

    def gradient_parts(self, leaf: Leaf, **asked: Any) -> Iterator[Any]:
        self.now[:] = [leaf.index]
        yield from super().gradient_parts(leaf, **asked)

    def _backward(self, batches: Any, asked: Any, dropout_key: int) -> Events:
        for event in super()._backward(batches, asked, dropout_key):
            if isinstance(event, FinalPart) and self.loaded.path.segment_size:
                *_, last = event.gradients
                layer = int(last.split(".")[2])
                self.record.append(("segment", layer))
                if self.now and (self.now[0], layer) in self.damage:
                    self.damage.remove((self.now[0], layer))
                    event.gradients[last] *= float("nan")
            yield event


class ToldEngine(Engine):
    """An engine with such a computer."""

    def __init__(self) -> None:
        super().__init__()
        self.record: list[tuple[str, int]] = []
        self.damage: list[tuple[int, int]] = []

    def _load(self, spec: m.RunSpec, progress: Callable[[str], None]) -> LoadedModel:
        loaded = super()._load(spec, progress)
        self._computer = Told(loaded, spec, record=self.record, damage=self.damage)
        return loaded


Wired = Callable[..., tuple[Wires, list[ToldEngine]]]


@pytest.fixture(scope="module")
def wired(three_layers: Path) -> Wired:
    """A cluster on the tiny llama, with nodes that are ready and a fixed adapter; each loads its model once."""
    known: dict[str, ToldEngine] = {}

    def join(*names: str, segment_size: int = 1) -> tuple[Wires, list[ToldEngine]]:
        wires = Wires(config_of(three_layers, segment_size=segment_size, rank=RANK))
        engines = [known.setdefault(name, ToldEngine()) for name in names]
        for name, engine in zip(names, engines, strict=True):
            engine.record = wires.record
            wires.join(engine, name)
        wires.settle()
        wires.cluster.set_adapter(0, drawn_adapter(wires.cluster.manifest))
        wires.settle()
        wires.record.clear()
        return wires, engines

    return join


@pytest.fixture(scope="module")
def expected(wired: Wired) -> dict[int, bytes]:
    """By number of leaves: the gradient without streaming, added up here."""
    _, (engine,) = wired("a")
    computer, leaves = engine._ready(), request(leaves=6).leaves
    computer.use(drawn_adapter(computer.loaded.manifest))
    vectors = []
    for leaf in leaves:
        parts = computer.gradient_parts(leaf, step=1, loss="", scalars={}, inputs={})
        by_name = {name: part for event in parts if isinstance(event, dict) for name, part in event.items()}
        vectors.append(np.concatenate([by_name[tensor.name] for tensor in computer.loaded.manifest]))
    return {count: fold(vectors[:count], lambda left, right: left + right).tobytes() for count in range(1, 7)}


def drawn_adapter(manifest: Manifest) -> Vector:
    drawn = np.random.default_rng(1).standard_normal(manifests.size(manifest)) * 0.02
    return drawn.astype(np.float32)


@pytest.mark.parametrize("names", ["a", "ab"])
@pytest.mark.parametrize("leaves", range(1, 7))
def test_streamed_partials_have_the_bits_of_whole_ones(
    leaves: int, names: str, wired: Wired, expected: dict[int, bytes]
) -> None:
    wires, _ = wired(*names)
    assert wires.gradient(request(leaves=leaves)).tobytes() == expected[leaves]
    partials = sum(kind == "VectorOffer" for kind, _ in wires.record)
    assert wires.record.count(("segment", 0)) == leaves
    whole = ("grown", len(expected[leaves]) // 4)
    assert wires.record.count(whole) == partials, "one leaf of each partial goes by parts"


def test_blocks_leave_while_lower_segments_still_compute(wired: Wired) -> None:
    wires, _ = wired("a")
    wires.gradient(request(leaves=4))
    order = [entry for entry in wires.record if entry[0] in ("segment", "VectorOffer", "VectorBlock", "VectorEnd")]
    before, order = order[: 3 * LAYERS], order[3 * LAYERS :]
    assert {kind for kind, _ in before} == {"segment"}, "the leaves left of the last one"
    assert order[0][0] == "VectorOffer", "offered when the backward of the last leaf begins"
    for layer in range(LAYERS - 1, 0, -1):
        place, below = order.index(("segment", layer)), order.index(("segment", layer - 1))
        assert any(kind == "VectorBlock" for kind, _ in order[place:below])
    assert order[-1][0] == "VectorEnd"


def test_on_the_whole_graph_nothing_is_offered_before_it_is_whole(wired: Wired) -> None:
    wires, _ = wired("a", segment_size=0)
    wires.gradient(request(leaves=2))
    assert not any(kind in ("grown", "segment") for kind, _ in wires.record)


@pytest.mark.parametrize("leaf", [0, LEAVES - 1])
def test_a_fault_in_mid_stream_withdraws_the_partial_on_both_sides(
    leaf: int, wired: Wired, expected: dict[int, bytes]
) -> None:
    wires, (a, _) = wired("a", "b")
    split = (
        {"a": Span(0, 1), "b": Span(1, LEAVES)}
        if leaf == 0
        else {"b": Span(0, LEAVES - 1), "a": Span(LEAVES - 1, LEAVES)}
    )
    wires.cluster.scheduler.assigner = lambda seconds: split
    a.damage.append((leaf, 0))
    held: list[int] = []
    wires.on_growth = lambda name: held.append(wires.cluster.transfers.pool.held)
    assert wires.gradient(request()).tobytes() == expected[LEAVES]
    assert max(held) > 0
    assert a.damage == []
    assert ("Fault", -1) in wires.record
    assert not wires.nodes["a"].session.uploading
    assert wires.cluster.transfers.pool.held == 0
    assert not wires.cluster.transfers.uploads._arriving


def test_a_cancel_in_mid_stream_frees_the_buffer_and_ends_the_backward(
    wired: Wired, expected: dict[int, bytes]
) -> None:
    wires, _ = wired("a", "b")
    wires.gradient(request())  # the speeds are known now
    wires.cluster.set_adapter(1, drawn_adapter(wires.cluster.manifest))
    wires.cluster.scheduler.assigner = lambda seconds: {"a": Span(0, LEAVES)}
    wires.record.clear()
    copied: list[int] = []

    def late(name: str) -> None:
        if name == "a" and not copied:
            copied.append(wires.cluster.transfers.pool.held)
            wires.nodes["a"].stopped = True
            wires.now += 8.0
            wires.beat()
            wires.cluster.tick(wires.now)

    wires.on_growth = late
    asked = request(step=2)
    asked = type(asked)(asked.verb, 2, 1, asked.leaves)
    assert wires.gradient(asked).tobytes() == expected[LEAVES]
    assert copied == [1]
    wires.nodes["a"].stopped = False
    wires.settle()
    lowest = [entry for entry in wires.record if entry[0] == "segment" and entry[1] == 0]
    assert len(lowest) == (LEAVES - 1) + LEAVES, "of the two last leaves only the copy's came to its end"
    assert wires.cluster.transfers.pool.held == 0
    assert not wires.nodes["a"].session.uploading
    assert wires.cluster.nodes["a"].works


def test_a_damaged_block_in_mid_stream_is_found_at_the_end_and_the_whole_goes_again(
    wired: Wired, expected: dict[int, bytes]
) -> None:
    wires, _ = wired("a")
    wires.damage_up = 1
    assert wires.gradient(request(leaves=2)).tobytes() == expected[2]
    assert wires.damage_up == 0
    assert [kind for kind, _ in wires.record].count("VectorOffer") == 2


def test_a_loss_that_is_not_finite_is_found_before_anything_is_offered(wired: Wired) -> None:
    _, (engine,) = wired("a")
    computer = engine._ready()
    computer.use(np.full(manifests.size(computer.loaded.manifest), np.float32("nan")))
    (leaf,) = request(leaves=1).leaves
    task = m.Assignment(SESSION, "gradient", 1, 1, 0, 0, 1, 1, "sft", "current", {})
    job = ComputeAssignment(task, (leaf,), ({},), computer.adapter, None)
    (result,) = AssignmentRun(computer, job, SwapWatch()).results()
    assert not isinstance(result, Partial)
    fault, _ = result
    assert isinstance(fault, m.Fault)
    assert (fault.kind, fault.leaf) == ("nonfinite", 0)


def test_a_partial_is_withdrawn_before_the_coordinator_hears_of_the_fault(wired: Wired) -> None:
    _, (engine,) = wired("a")
    computer, (leaf,) = engine._ready(), request(leaves=1).leaves
    adapter = drawn_adapter(computer.loaded.manifest)
    computer.use(adapter)
    engine.damage.append((0, 0))
    task = m.Assignment(SESSION, "gradient", 1, 1, 0, 0, 1, 1, "sft", "current", {})
    results = AssignmentRun(computer, ComputeAssignment(task, (leaf,), ({},), adapter, None), SwapWatch()).results()
    session, kinds = new_session(), []
    for result in results:
        kinds.append("partial" if isinstance(result, Partial) else type(result[0]).__name__)
        session.deliver(result)
        tell(session, (m.Credit(SESSION, 1, 10), b""))  # all of it could leave
        assert (1 in session.outgoing.vectors) == (kinds[-1] == "partial")
    assert kinds == ["partial"] * LAYERS + ["Fault"]
    assert [type(message).__name__ for message in said(session)] == ["VectorOffer", "Fault"]


def test_an_assignment_that_is_closed_early_computes_no_further_segment(wired: Wired) -> None:
    wires, (engine,) = wired("a")
    computer, (leaf,) = engine._ready(), request(leaves=1).leaves
    adapter = drawn_adapter(computer.loaded.manifest)
    task = m.Assignment(SESSION, "gradient", 1, 1, 0, 0, 1, 1, "sft", "current", {})
    job = ComputeAssignment(task, (leaf,), ({},), adapter, None)
    results, session = engine.perform(job, SESSION, lambda sentence: None), new_session()
    for _ in range(2):  # its offer, and the top layer
        session.deliver(next(results))
    results.close()
    session.done()
    assert wires.record == [("segment", LAYERS - 1)]
    assert not session.outgoing.vectors


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_over_loopback_a_reset_in_mid_stream_changes_no_bit(three_layers: Path, expected: dict[int, bytes]) -> None:
    port = free_ports()
    proxy = Proxy(port).start()
    coordinator = start_coordinator(config_of(three_layers, segment_size=1, rank=RANK), port)
    reset = proxy.when(UP, lambda message: isinstance(message, m.VectorBlock), lambda seen: proxy.cut())
    try:
        with thread_nodes(("a", HERE, proxy.ports[CONTROL]), ("b", HERE, port)):
            coordinator.send_adapter()
            coordinator.fleet.wait_for_nodes(2, 2, 60.0)
            for step in (1, 2, 3):
                assert coordinator.gradient(step).tobytes() == expected[LEAVES]
            assert reset.fired.is_set()
            assert not proxy.saw(DOWN, m.Restart)
            coordinator.fleet.close("the test is over")
    finally:
        proxy.close()
