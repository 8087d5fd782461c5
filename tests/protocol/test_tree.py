"""The canonical tree: its shape, its pieces, and that a sum has the same bits wherever it is taken."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxdist.protocol.tree import Span, TreeSum, family, fold, fold_span, halves, subtrees

Vector = npt.NDArray[np.float32]
ELEMENTS = 64


def reference_tree(start: int, stop: int) -> Any:
    """RFC 6962's tree as nested pairs, written down independently: k is the largest power of two smaller than n."""
    n = stop - start
    if n == 1:
        return start
    k = max(2**e for e in range(n.bit_length()) if 2**e < n)
    return reference_tree(start, start + k), reference_tree(start + k, stop)


def spans_of(tree: Any) -> tuple[int, int, list[Span]]:
    """First leaf, end, and every subtree of nested pairs."""
    if isinstance(tree, int):
        return tree, tree + 1, [Span(tree, tree + 1)]
    start, _, left = spans_of(tree[0])
    _, stop, right = spans_of(tree[1])
    return start, stop, [Span(start, stop), *left, *right]


def leaf_vectors(total: int, seed: int) -> list[Vector]:
    """Gradients of very different sizes, so that the order of additions shows."""
    random = np.random.default_rng(seed)
    scales = 10.0 ** random.integers(-3, 4, (total, 1))
    return list((random.standard_normal((total, ELEMENTS)) * scales).astype(np.float32))


def add(left: Vector, right: Vector) -> Vector:
    return left + right


def add_in_place(left: Vector, right: Vector) -> Vector:
    return np.add(left, right, out=left)


def spans_at(total: int, cuts: Sequence[int]) -> list[Span]:
    edges = sorted({0, total, *cuts})
    return [Span(start, stop) for start, stop in pairwise(edges)]


@st.composite
def splits(draw: Callable[..., Any]) -> tuple[int, list[Span]]:
    """A number of leaves and their split over 1 to 9 nodes."""
    total = draw(st.integers(1, 130))
    cuts = draw(st.lists(st.integers(1, total), max_size=8))
    return total, spans_at(total, cuts)


@pytest.mark.parametrize("total", range(1, 70))
def test_the_tree_splits_at_the_largest_power_of_two_below(total: int) -> None:
    shape = fold_span(Span(0, total), lambda index: index, lambda left, right: (left, right))  # type: ignore[arg-type,return-value]
    assert shape == reference_tree(0, total)
    assert fold(list(range(total)), lambda left, right: (left, right)) == shape  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("total", range(1, 70))
def test_families_are_those_of_the_tree(total: int) -> None:
    everything = spans_of(reference_tree(0, total))[2]
    parents = {child: (span, halves(span)) for span in everything if len(span) > 1 for child in halves(span)}
    for span in everything:
        found = family(total, span)
        if span == Span(0, total):
            assert found is None
        else:
            assert found is not None
            parent, sibling = found
            assert (parent, tuple(sorted((span, sibling)))) == parents[span]


@pytest.mark.parametrize("total", range(1, 40))
def test_what_is_no_subtree_has_no_family(total: int) -> None:
    everything = set(spans_of(reference_tree(0, total))[2])
    for start in range(-1, total + 2):
        for stop in range(-1, total + 2):
            if Span(start, stop) not in everything:
                with pytest.raises(ValueError, match="no subtree"):
                    family(total, Span(start, stop))


@pytest.mark.parametrize("total", range(1, 40))
def test_subtrees_cover_any_run_exactly_with_the_fewest_whole_subtrees(total: int) -> None:
    everything = set(spans_of(reference_tree(0, total))[2])
    for start in range(total):
        # Fewest, by an independent count: from each leaf on, the cheapest way to the end of the span.
        for stop in range(start + 1, total + 1):
            pieces = subtrees(total, Span(start, stop))
            assert set(pieces) <= everything
            assert [leaf for piece in pieces for leaf in range(piece.start, piece.stop)] == list(range(start, stop))
            fewest = [0] + [10**9] * (stop - start)
            for here in range(start, stop):
                for there in range(here + 1, stop + 1):
                    if Span(here, there) in everything:
                        fewest[there - start] = min(fewest[there - start], fewest[here - start] + 1)
            assert len(pieces) == fewest[-1]


@given(st.data())
def test_a_run_needs_at_most_two_subtrees_per_level(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 5000))
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    assert len(subtrees(total, Span(start, stop))) <= 2 * math.log2(total) + 2


@pytest.mark.parametrize("nodes", range(1, 13))
@pytest.mark.parametrize("k", range(6))
def test_equal_shares_of_n_times_a_power_of_two_leaves_are_one_subtree_each(nodes: int, k: int) -> None:
    share, total = 2**k, nodes * 2**k
    for node in range(nodes):
        span = Span(node * share, (node + 1) * share)
        assert subtrees(total, span) == [span]


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (3, 3), (4, 3), (-1, 2), (0, 9), (8, 9)])
def test_a_run_outside_the_leaves_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="not within 8 leaves"):
        subtrees(8, Span(start, stop))


def test_fold_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        fold([], add)


@given(splits(), st.integers(0, 2**32 - 1), st.randoms(use_true_random=False))
def test_split_then_combine_has_the_bits_of_the_whole_batch(
    split: tuple[int, list[Span]], seed: int, random: Any
) -> None:
    total, spans = split
    leaves = leaf_vectors(total, seed)
    whole = fold(leaves, add)
    partials = [
        (span, fold_span(span, lambda index: leaves[index].copy(), add_in_place))
        for part in spans
        for span in subtrees(total, part)
    ]
    random.shuffle(partials)
    total_sum: TreeSum[Vector] = TreeSum(total, add_in_place)
    for span, vector in partials:
        assert not total_sum.done
        total_sum.put(span, vector)
    assert total_sum.done
    assert total_sum.result.tobytes() == whole.tobytes()
    assert len(total_sum.held) == 1


def test_naive_sums_per_node_have_other_bits_so_the_law_is_worth_its_tree() -> None:
    different = elements = 0
    for seed in range(40):
        total = 24
        leaves = leaf_vectors(total, seed)
        whole = fold(leaves, add)
        per_node = [
            sum(leaves[span.start + 1 : span.stop], leaves[span.start]) for span in spans_at(total, (5, 13, 18))
        ]
        naive = sum(per_node[1:], per_node[0])
        different += int((naive != whole).sum())
        elements += naive.size
    assert different / elements > 0.1


def test_a_sum_in_arrival_order_would_have_other_bits() -> None:
    leaves = leaf_vectors(16, 3)
    assert (sum(leaves[1:], leaves[0]) != fold(leaves, add)).any()
    assert (sum(leaves[-2::-1], leaves[-1]) != sum(leaves[1:], leaves[0])).any()


def test_operands_keep_their_sides() -> None:
    # Strings show what floats would hide: left always stands before right, whichever came first.
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 4, 0, 3, 1]):
        total: TreeSum[str] = TreeSum(5, lambda left, right: f"({left}{right})")
        for leaf in order:
            total.put(Span(leaf, leaf + 1), str(leaf))
        assert total.result == "(((01)(23))4)"


@given(splits(), st.data())
def test_the_sum_refuses_leaves_that_it_has_and_changes_nothing(
    split: tuple[int, list[Span]], data: st.DataObject
) -> None:
    total, spans = split
    pieces = [span for part in spans for span in subtrees(total, part)]
    order = data.draw(st.permutations(pieces))
    taken = order[: data.draw(st.integers(1, len(order)))]
    tree: TreeSum[int] = TreeSum(total, lambda left, right: left + right)
    for span in taken:
        tree.put(span, len(span))
    held = dict(tree.held)
    again = data.draw(st.sampled_from(taken))
    doubles = [again, Span(0, total), *(Span(leaf, leaf + 1) for leaf in (again.start, again.stop - 1))]
    for double in doubles:
        with pytest.raises(ValueError, match="already summed"):
            tree.put(double, 1)
    assert tree.held == held


def test_the_sum_refuses_what_is_no_subtree() -> None:
    tree: TreeSum[int] = TreeSum(6, lambda left, right: left + right)
    for span in (Span(1, 3), Span(0, 3), Span(4, 7), Span(2, 2), Span(3, 2), Span(-1, 1), Span(6, 7)):
        with pytest.raises(ValueError, match="no subtree"):
            tree.put(span, 1)
    assert tree.held == {}


def test_there_is_no_result_before_every_leaf_is_in() -> None:
    tree: TreeSum[int] = TreeSum(2, lambda left, right: left + right)
    tree.put(Span(0, 1), 1)
    with pytest.raises(KeyError):
        _ = tree.result


@pytest.mark.parametrize("total", [1, 2, 3, 7, 8, 9, 31, 33, 64, 100])
def test_a_node_holds_at_most_one_value_per_level_and_one(total: int) -> None:
    alive = most = 0

    def make(index: int) -> int:
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        return 1

    def join(left: int, right: int) -> int:
        nonlocal alive
        alive -= 1
        return left + right

    assert fold_span(Span(0, total), make, join) == total
    assert most <= math.ceil(math.log2(total)) + 1


@given(splits())
def test_partials_in_leaf_order_wait_in_at_most_one_value_per_level(split: tuple[int, list[Span]]) -> None:
    total, spans = split
    tree: TreeSum[int] = TreeSum(total, lambda left, right: left + right)
    for part in spans:
        for span in subtrees(total, part):
            tree.put(span, len(span))
            assert len(tree.held) <= max(math.ceil(math.log2(total)), 1)
    assert tree.result == total
