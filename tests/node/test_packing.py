"""Packed rows give what each row alone gives, and a model that cannot be packed is computed in another mode."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxdist.node.backward.backward import GradientPath, backward, score
from mlxdist.node.backward.choose_packing import choose_packing, find_mixers, log_probs, tiny_items
from mlxdist.node.backward.dropout import has_dropout, no_dropout
from mlxdist.node.backward.events import gathered
from mlxdist.node.backward.layout import alone, pack
from mlxdist.node.backward.packing import NOT_PACKED, Packing, Piece, packed
from mlxdist.node.backward.pytree import UnsupportedError
from mlxdist.protocol.errors import DataError
from mlxdist.protocol.leaves import Row
from mlxdist.protocol.packing import APART, BY_PIECE, MODES, PACKED, weaker
from scripts.plain_gradient import furthest
from scripts.tiny_architectures import VOCABULARY, add_lora, tiny_model

PATHS = {
    "whole": GradientPath(),
    "all positions": GradientPath(supervised_head=False),
    "segments of one": GradientPath(segment_size=1),
    "segments of two": GradientPath(segment_size=2),
    "checkpoint": GradientPath(checkpoint=True),
}
Items = list[tuple[Row, ...]]


def row(ids: list[int], prompt: int = 1) -> Row:
    return Row(0, np.array(ids, np.int32), np.array([int(i >= prompt) for i in range(len(ids))], np.uint8))


def drawn(count: int, seed: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(1, VOCABULARY, count)]


def items() -> Items:
    """Rows of different lengths, a pair with a prompt, one whose answers begin alike, one that shares nothing."""
    prompt, start = drawn(9, 1), drawn(2, 2)
    return [
        (row(drawn(17, 3), 5), row(drawn(3, 4), 1)),
        (row(prompt + drawn(6, 5), 9), row(prompt + drawn(1, 6), 9)),
        (row(prompt + start + drawn(4, 7), 9), row(prompt + start, 9)),
        (row([1, 2], 1), row([3, 4], 1)),
    ]


def model_of(architecture: str = "llama") -> mx.array:
    model = tiny_model(architecture)
    add_lora(model)
    return model


def gradient(model, batches, path: GradientPath) -> tuple[mx.array, dict[str, mx.array]]:  # type: ignore[no-untyped-def]
    def loss(sums: list[mx.array]) -> mx.array:
        every = mx.concatenate(sums)
        return (every * every).sum() / 100 - every.sum()

    sums, grads = gathered(backward(model, batches, loss, head_chunk=7, path=path))
    return mx.concatenate(sums), grads


@pytest.mark.parametrize("path", PATHS)
def test_a_packed_leaf_has_the_sums_scores_and_gradient_of_its_rows_alone_on_every_path(path: str) -> None:
    model, rows = model_of(), [each for item in items() for each in item]
    sums, grads = gradient(model, [pack(items())], PATHS[path])
    expected, expected_grads = gradient(model, [alone(each) for each in rows], PATHS["whole"])
    np.testing.assert_allclose(np.array(sums), np.array(expected), rtol=2e-6, atol=2e-6)
    assert furthest(grads, expected_grads) < 1e-5
    assert np.array_equal(np.array(score(model, pack(items()), head_chunk=7, path=PATHS[path])), np.array(sums))


@pytest.mark.parametrize("architecture", ["gemma3_text", "qwen3_moe", "gpt_oss", "deepseek_v2"])
def test_windows_experts_and_sinks_need_no_more_than_the_two_functions(architecture: str) -> None:
    model = model_of(architecture)
    assert choose_packing(model, PATHS["whole"], tokens=120).mode == PACKED


@pytest.mark.parametrize(
    ("architecture", "mixers"), [("gemma2", ["Attention"]), ("mamba2", ["Mamba2Block"]), ("lfm2", ["ShortConv"])]
)
def test_what_mixes_positions_in_its_own_way_is_called_for_each_row(architecture: str, mixers: list[str]) -> None:
    model = model_of(architecture)
    choice = choose_packing(model, PATHS["segments of one"], tokens=60)
    assert (choice.mode, [kind.__name__ for kind in choice.mixers]) == (BY_PIECE, mixers)
    assert mixers[0] in choice.reason
    _, grads = gradient(model, [pack(items(), choice.mixers)], PATHS["segments of one"])
    _, expected = gradient(model, [alone(each) for item in items() for each in item], PATHS["whole"])
    assert furthest(grads, expected) < 1e-5
    assert find_mixers(model, tiny_items(48, VOCABULARY)) == choice.mixers


def test_a_model_with_learned_positions_is_computed_row_by_row_and_says_why() -> None:
    choice = choose_packing(model_of("gpt2"), PATHS["whole"], tokens=60)
    assert (choice.mode, choice.mixers) == (APART, ())
    assert choice.reason.startswith("This model's rows cannot be packed (its gradient differs from")


def test_what_differs_only_on_a_row_longer_than_a_threshold_is_seen_at_the_size_of_the_leaf() -> None:
    """Scale by position: the tiny batch alone does not reach the length at which it begins."""
    model = tiny_model("llama")
    add_lora(model)
    attention = type(model.layers[0].self_attn)
    call = attention.__call__

    def scaled(module, x, *args, **kwargs):  # type: ignore[no-untyped-def]
        late = (mx.arange(x.shape[1]) >= 100)[None, :, None]
        return call(module, mx.where(late, 1.5 * x, x), *args, **kwargs)

    attention.__call__ = scaled
    try:
        assert choose_packing(model, PATHS["whole"], tokens=60).mode == PACKED
        assert choose_packing(model, PATHS["whole"], tokens=200).mode == BY_PIECE
    finally:
        attention.__call__ = call


def test_a_mode_that_the_run_does_not_allow_is_not_chosen() -> None:
    model = model_of()
    assert choose_packing(model, PATHS["whole"], tokens=60, best=BY_PIECE).mode == APART
    assert choose_packing(model, PATHS["whole"], tokens=60, best=APART).mode == APART


def test_dropout_does_not_disturb_the_check_and_is_as_before() -> None:
    model = tiny_model("llama")
    add_lora(model, dropout=0.5)
    assert choose_packing(model, PATHS["segments of one"], tokens=60).mode == PACKED
    assert has_dropout(model)
    with no_dropout(model):
        assert not has_dropout(model)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(2, 12), min_size=1, max_size=5), st.integers(0, 1000))
def test_pieces_cover_the_packed_row_without_gaps_and_positions_point_to_the_token_before_the_target(
    lengths: list[int], seed: int
) -> None:
    rows: Items = [(row(drawn(length, seed + place), 1),) for place, length in enumerate(lengths)]
    batch = pack(rows)
    ends = [piece.end for piece in batch.packing.pieces]
    assert [piece.start for piece in batch.packing.pieces] == [0, *ends[:-1]]
    assert batch.inputs.shape == (1, ends[-1])
    assert batch.counts == tuple(length - 1 for length in lengths)
    assert batch.ids.tolist() == [int(i) for (each,) in rows for i in each.ids[:-1]]
    assert batch.targets.tolist() == [int(i) for (each,) in rows for i in each.ids[1:]]


def test_a_pair_computes_its_prompt_once_and_the_last_prompt_token_is_picked_twice() -> None:
    prompt = drawn(9, 1)
    batch = pack([(row([*prompt, 5, 6, 7], 9), row([*prompt, 8, 9], 9))])
    assert batch.packing.pieces == (Piece(0, 11), Piece(11, 12, (0, 9)))
    assert batch.positions.tolist() == [8, 9, 10, 8, 11]
    assert batch.rows.tolist() == [0, 0, 0, 1, 1]
    assert batch.inputs.tolist() == [[*prompt, 5, 6, 8]]


def test_orpo_computes_the_chosen_text_once_for_both_of_its_sums() -> None:
    ids = drawn(10, 1)
    batch = pack([(row(ids, 6), row([*ids[:6], 3, 4], 6), row(ids, 1))])
    assert [piece.end for piece in batch.packing.pieces] == [9, 10]
    assert batch.counts == (4, 2, 9)


def test_the_tokens_of_neighbors_change_nothing_to_the_last_bit() -> None:
    model, mine = model_of(), items()
    other = [(replace(mine[0][0], ids=1 + mine[0][0].ids % (VOCABULARY - 1)), mine[0][1]), *mine[1:]]
    first = int(mine[0][0].targets.sum())
    before, after = (np.array(log_probs(model, PATHS["whole"], [pack(some)])) for some in (mine, other))
    assert np.array_equal(before[first:], after[first:])
    assert not np.array_equal(before[:first], after[:first])


def test_the_two_functions_are_as_before_also_after_an_error_and_other_lengths_are_refused() -> None:
    model = model_of()
    before = mx.fast.rope, mx.fast.scaled_dot_product_attention
    with pytest.raises(UnsupportedError, match="over another length"), packed(model, Packing((Piece(0, 4),))):
        model(mx.array([[1, 2, 3]]))
    assert (mx.fast.rope, mx.fast.scaled_dot_product_attention) == before
    with packed(model, NOT_PACKED):
        model(mx.array([[1, 2, 3]]))


def test_a_negative_token_id_is_refused() -> None:
    with pytest.raises(DataError, match="negative"):
        pack([(row([1, -2, 3]),)])


def test_the_weaker_of_two_modes_is_the_later_one() -> None:
    assert [weaker(left, right) for left in MODES for right in MODES] == [
        *(PACKED, BY_PIECE, APART),
        *(BY_PIECE, BY_PIECE, APART),
        *(APART, APART, APART),
    ]
    with pytest.raises(ValueError, match="tuple"):
        weaker(PACKED, "another")
