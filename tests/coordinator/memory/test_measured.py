from dataclasses import replace

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mlxdist.coordinator.memory.measured import MeasuredModel, law_through, measured_model
from mlxdist.coordinator.memory.prediction import (
    CHUNKS,
    WHOLE_GRAPH,
    LeafSize,
    ModelShape,
    choose,
    largest_length,
    peak,
)
from mlxdist.coordinator.memory.probes import believed
from mlxdist.protocol.memory_probe import (
    GRAPH_CHUNKS,
    HEAD_CHUNKS,
    SEVERAL,
    SHORT,
    KindBytes,
    ProbeAnswer,
    companion,
    read_answer,
    segment_lengths,
)

LONG = 1024
ROWS = (SHORT, LONG)
BYTES = st.integers(0, 10**9)
COEFFICIENTS = st.floats(0, 1e6)
SHAPE = ModelShape(4, 256, 4, 256, 128, 768, 8192, half=False)


def answer_of(layers: tuple[int, ...], *, kept: list[tuple[int, int]], once: int, head: int) -> ProbeAnswer:
    """A measurement where the layers of each kind keep `token * T + pair * T * T`, and hold `once * T` beside."""

    def held(kind: int, tokens: int) -> int:
        token, pair = kept[kind]
        return token * tokens + pair * tokens * tokens

    kinds = []
    for number in range(len(kept)):
        count = min(layers.count(number), SEVERAL)
        beside = companion(layers, number) if count == 1 else None
        more = (
            (lambda t, n=number, c=count: (c - 1) * held(n, t)) if beside is None else (lambda t, b=beside: held(b, t))
        )
        one = tuple(held(number, t) + once * t for t in ROWS)
        kinds.append(
            KindBytes(
                layers=count,
                one=(one[0], one[1]),
                several=(one[0] + more(SHORT), one[1] + more(LONG)),
                segment=tuple(held(number, t) + once * t for t in segment_lengths(LONG)),
            )
        )
    first = held(0, SHORT)
    return ProbeAnswer(
        long=LONG,
        kinds=tuple(kinds),
        order=layers,
        head=(head * HEAD_CHUNKS[0] + 8 * SHORT, head * HEAD_CHUNKS[1] + 8 * SHORT),
        graph=(first + 2 * head * GRAPH_CHUNKS[0], first + head * GRAPH_CHUNKS[1]),
    )


@given(token=COEFFICIENTS, pair=st.floats(0, 1e3))
def test_a_law_of_features_and_scores_is_recovered(token: float, pair: float) -> None:
    law = law_through(*(token * t + pair * t * t for t in ROWS), ROWS)
    for tokens in (64, 256, 777, 8192):
        assert law.at(tokens, tokens) == pytest.approx(token * tokens + pair * tokens**2, rel=1e-6, abs=1.0)


@given(fixed=st.floats(0, 1e9), token=COEFFICIENTS)
def test_a_law_with_a_fixed_part_is_recovered(fixed: float, token: float) -> None:
    law = law_through(*(fixed + token * t for t in ROWS), ROWS)
    for tokens in (256, 777, 8192):
        assert law.at(tokens, tokens) == pytest.approx(fixed + token * tokens, rel=1e-6, abs=1.0)


@given(short=st.floats(-1e9, 1e12), long=st.floats(-1e9, 1e12))
def test_no_law_has_a_negative_coefficient_or_falls_with_the_leaf(short: float, long: float) -> None:
    law = law_through(short, long, ROWS)
    assert min(law.fixed, law.token, law.pair) >= 0
    for tokens, length in ((1, 1), (256, 256), (1000, 30)):
        assert law.at(tokens, length) <= law.at(2 * tokens, length) <= law.at(2 * tokens, 2 * length)
    if 0 <= short <= long and long * SHORT <= short * LONG * (LONG / SHORT):
        assert law.at(SHORT, SHORT) == pytest.approx(short, rel=1e-6, abs=1.0)
        assert law.at(LONG, LONG) == pytest.approx(long, rel=1e-6, abs=1.0)


@given(
    layers=st.lists(st.integers(0, 2), min_size=3, max_size=24),
    kept=st.lists(st.tuples(st.integers(1, 10**5), st.integers(0, 100)), min_size=3, max_size=3),
    once=st.integers(1, 10**5),
    tokens=st.integers(1, 10_000),
)
def test_the_memory_of_all_layers_is_found_from_a_few_of_each_kind(
    layers: list[int], kept: list[tuple[int, int]], once: int, tokens: int
) -> None:
    assume(set(layers) == {0, 1, 2})
    model = measured_model(answer_of(tuple(layers), kept=kept, once=once, head=0))
    held = [token * tokens + pair * tokens**2 for token, pair in kept]
    whole = sum(held[kind] for kind in layers) + once * tokens
    assert model.whole(tokens, tokens, tokens, 32) == pytest.approx(whole, rel=1e-6)
    for size in (1, 2, 5):
        parts = [layers[start : start + size] for start in range(0, len(layers), size)]
        largest = max(sum(held[kind] for kind in part) for part in parts) + once * tokens
        assert model.segment(tokens, tokens, size) == pytest.approx(largest, rel=1e-6)


def test_the_head_counts_where_it_holds_more_than_a_layer_and_twice_where_chunks_overlap() -> None:
    model = measured_model(answer_of((0, 0), kept=[(1, 0)], once=1, head=1000))
    assert model.whole(4096, 4096, 4096, 512) == pytest.approx(2 * 4096 + 2 * 1000 * 512)
    assert model.whole(512, 512, 512, 512) == pytest.approx(2 * 512 + 1000 * 512)
    assert model.segments(4096, 4096, 4096, 512, 1) == pytest.approx(1000 * 512 + 8 * 4096)
    assert model.whole(10**6, 10**6, 10**6, 32) == pytest.approx(3 * 10**6)


def test_layers_below_the_lowest_that_trains_keep_nothing() -> None:
    model = measured_model(answer_of((0, 0, 0, 0), kept=[(100, 1)], once=10, head=0))
    upper = replace(model, order=(-1, -1, -1, 0))
    assert upper.whole(64, 64, 64, 32) < model.whole(64, 64, 64, 32) / 3
    assert (model.borders(1), model.borders(2), upper.borders(1)) == (3, 1, 1)


ANSWERS = st.builds(
    lambda kinds, layers, head, graph: ProbeAnswer(LONG, tuple(kinds), tuple(layers), head, graph),
    kinds=st.lists(
        st.builds(
            KindBytes,
            layers=st.integers(1, SEVERAL),
            one=st.tuples(BYTES, BYTES),
            several=st.tuples(BYTES, BYTES),
            segment=st.tuples(BYTES, BYTES, BYTES, BYTES),
        ),
        min_size=2,
        max_size=2,
    ),
    layers=st.lists(st.integers(-1, 1), min_size=1, max_size=12).map(lambda order: [*sorted(order), 0]),
    head=st.tuples(BYTES, BYTES),
    graph=st.tuples(BYTES, BYTES),
)


@given(ANSWERS, st.floats(1e6, 1e11))
def test_any_answer_gives_a_peak_that_is_not_negative_and_grows_with_the_leaf(answer: ProbeAnswer, free: float) -> None:
    """A node may send what it likes: the choice of settings and of the longest row still end, and fit."""
    shape = replace(SHAPE, measured=(measured_model(answer),))
    leaf = LeafSize(2000, 4000, 4000, 1000, 500)
    for size in (WHOLE_GRAPH, 1, 3):
        peaks = [peak(shape, leaf.shorter(length), segment_size=size, head_chunk=64) for length in (64, 512, 2000)]
        assert 0 <= peaks[0] <= peaks[1] <= peaks[2]
    chosen = choose(shape, leaf, free)
    assert chosen is None or (chosen.peak <= free and chosen.head_chunk in CHUNKS)
    longest = largest_length(shape, leaf, free)
    assert longest == 0 or choose(shape, leaf.shorter(longest), free) is not None


def law(token: int) -> MeasuredModel:
    return measured_model(answer_of((0, 0, 0, 0), kept=[(token, 1)], once=token, head=100))


def test_the_machine_that_needs_most_decides() -> None:
    small, large = law(10_000), law(30_000)
    leaf = LeafSize(512, 512, 512)
    for size in (WHOLE_GRAPH, 1):
        alone = peak(replace(SHAPE, measured=(large,)), leaf, segment_size=size, head_chunk=64)
        assert peak(replace(SHAPE, measured=(small, large)), leaf, segment_size=size, head_chunk=64) == alone


def test_a_measurement_comes_before_the_table() -> None:
    leaf = LeafSize(4096, 4096, 4096)
    blocks = law(2000)  # attention in blocks: next to nothing grows with the square
    table = peak(SHAPE, leaf, segment_size=WHOLE_GRAPH, head_chunk=64)
    assert peak(replace(SHAPE, measured=(blocks,)), leaf, segment_size=WHOLE_GRAPH, head_chunk=64) < table / 5


def test_an_answer_far_from_the_table_is_not_believed() -> None:
    usual = peak(SHAPE, LeafSize(SHORT, SHORT, SHORT), segment_size=WHOLE_GRAPH, head_chunk=32) // (5 * SHORT)
    for factor, taken in ((1, True), (10, True), (100, False)):
        for token in (usual * factor, usual // factor):
            answer = answer_of((0, 0, 0, 0), kept=[(token, 0)], once=token, head=0)
            assert (believed(answer, SHAPE) is not None) == taken


def test_an_answer_survives_its_way_over_the_wire() -> None:
    answer = answer_of((0, 1, 1), kept=[(5, 1), (7, 0)], once=3, head=2)
    assert read_answer(msgspec.json.encode(answer)) == answer


@pytest.mark.parametrize(
    "change",
    [
        {"order": [0, 5]},
        {"order": [-1]},
        {"order": [0] * 5000},
        {"kinds": []},
        {"long": 100},
        {"long": 10**9},
        {"head": [-1, 5]},
        {"head": [1e300, 5]},
        {"head": [1 << 60, 5]},
        {"head": [1]},
        {"more": 1},
    ],
)
def test_an_answer_that_is_none_is_refused(change: dict[str, object]) -> None:
    right = msgspec.to_builtins(answer_of((0, 0), kept=[(5, 1)], once=3, head=2))
    with pytest.raises(ValueError, match=r"."):
        read_answer(msgspec.json.encode({**right, **change}))
    for line in (b"", b"null", b"[]", b"{" * 100, b"x" * (1 << 20)):
        with pytest.raises(ValueError, match=r"."):
            read_answer(line)
