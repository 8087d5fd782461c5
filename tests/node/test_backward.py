import itertools
import sys
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxdist.node.backward.backward import GradientPath, MicroBatch, backward, score
from mlxdist.node.backward.events import Computing, Events, FinalPart, Loss, RowSums, gathered
from mlxdist.protocol.errors import DataError
from scripts.plain_gradient import furthest, padded_rows, plain_gradient, plain_sums
from scripts.tiny_architectures import VOCABULARY, add_lora, tiny_model

WHOLE, FULL_HEAD, CHECKPOINT = GradientPath(), GradientPath(supervised_head=False), GradientPath(checkpoint=True)
SEGMENTS = [GradientPath(segment_size=size) for size in (1, 2, 3, 4)]
PATHS = [WHOLE, FULL_HEAD, CHECKPOINT, *SEGMENTS]


def name(path: GradientPath) -> str:
    kind = f"segments of {path.segment_size}" if path.segment_size else "checkpoint" if path.checkpoint else "whole"
    return kind if path.supervised_head else f"{kind}, full head"


def sft(sums: list[mx.array]) -> mx.array:
    return -sums[0].sum()


def dpo(sums: list[mx.array]) -> mx.array:
    return -nn.log_sigmoid(0.1 * (sums[0] - sums[1] - mx.array([1.0, -3.0]))).sum()


def kto(sums: list[mx.array]) -> mx.array:
    labels, reference_point = mx.array([True, False, True]), 0.7
    reward = sums[0] + mx.array([150.0, 14.0, 5.0])
    desirable = 1 - mx.sigmoid(0.1 * (reward - reference_point))
    return mx.where(labels, desirable, 1.5 * (1 - mx.sigmoid(0.1 * (reference_point - reward)))).sum()


# Very different lengths, padding, and a row that is all prompt but one token.
THREE = padded_rows(3, (40, 9, 23), (30, 4, 1), VOCABULARY)
CHOSEN = padded_rows(4, (33, 12), (20, 5), VOCABULARY)
REJECTED = padded_rows(5, (18, 30), (5, 29), VOCABULARY)
ONE_TARGET = padded_rows(6, (21,), (1,), VOCABULARY)
CASES: dict[str, tuple[Loss, list[MicroBatch]]] = {
    "sft": (sft, [THREE]),
    "dpo": (dpo, [CHOSEN, REJECTED]),
    "kto": (kto, [THREE]),
    "one target": (sft, [ONE_TARGET]),
}


def lora_llama(**changes: object) -> nn.Module:
    model = tiny_model("llama", **changes)
    add_lora(model)
    return model


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("path", PATHS, ids=name)
def test_every_path_equals_plain_autograd(path: GradientPath, case: str) -> None:
    loss, batches = CASES[case]
    model = lora_llama()
    value, expected = plain_gradient(model, batches, loss)
    sums, got = gathered(backward(model, batches, loss, head_chunk=8, path=path))
    assert furthest(got, expected) < 1e-5
    assert loss(sums).item() == pytest.approx(value.item(), rel=1e-5)
    for batch, row_sums in zip(batches, sums, strict=True):
        np.testing.assert_allclose(row_sums, plain_sums(model, batch), rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 5, 35, 1000])
@pytest.mark.parametrize("path", [WHOLE, SEGMENTS[1]], ids=name)
def test_the_size_of_a_head_chunk_changes_no_gradient(path: GradientPath, chunk: int) -> None:
    model = lora_llama()
    _, expected = plain_gradient(model, [THREE], kto)
    assert furthest(gathered(backward(model, [THREE], kto, head_chunk=chunk, path=path))[1], expected) < 1e-5


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_the_same_dropout_key_drops_the_same_elements_on_every_path(path: GradientPath) -> None:
    model = tiny_model("llama")
    add_lora(model, dropout=0.3)
    _, expected = plain_gradient(model, [CHOSEN, REJECTED], dpo, key=2**63 + 5)
    _, other = plain_gradient(model, [CHOSEN, REJECTED], dpo, key=6)
    _, got = gathered(backward(model, [CHOSEN, REJECTED], dpo, head_chunk=8, path=path, dropout_key=2**63 + 5))
    assert furthest(got, expected) < 1e-5
    assert furthest(other, expected) > 0.1


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("path", SEGMENTS, ids=name)
def test_the_backward_ends_with_the_lowest_layer_that_trains(path: GradientPath, layers: int) -> None:
    model = tiny_model("llama")
    add_lora(model, layers=layers)
    _, expected = plain_gradient(model, [THREE], sft)
    assert furthest(gathered(backward(model, [THREE], sft, head_chunk=8, path=path))[1], expected) < 1e-5


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (8, 32), (8, 64)])
def test_a_quantized_base_gives_plain_autograds_gradient(bits: int, group: int, tied: bool) -> None:
    model = tiny_model("llama", hidden_size=64, intermediate_size=128, head_dim=16, tie_word_embeddings=tied)
    nn.quantize(model, group_size=group, bits=bits)
    model.freeze()
    add_lora(model)
    _, expected = plain_gradient(model, [CHOSEN, REJECTED], dpo)
    for path in (WHOLE, SEGMENTS[0]):
        assert furthest(gathered(backward(model, [CHOSEN, REJECTED], dpo, head_chunk=8, path=path))[1], expected) < 1e-5


@pytest.mark.parametrize("path", [WHOLE, FULL_HEAD, SEGMENTS[0]], ids=name)
def test_a_score_has_the_bits_of_the_gradients_own_forward(path: GradientPath) -> None:
    model = lora_llama()
    sums, _ = gathered(backward(model, [CHOSEN, REJECTED], dpo, head_chunk=8, path=path))
    for batch, row_sums in zip([CHOSEN, REJECTED], sums, strict=True):
        assert np.array_equal(score(model, batch, head_chunk=8, path=path), row_sums)


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_the_same_work_twice_gives_the_same_bits(path: GradientPath) -> None:
    model = lora_llama()
    (_, first), (_, second) = (gathered(backward(model, [THREE], kto, head_chunk=8, path=path)) for _ in range(2))
    assert all(np.array_equal(first[key], second[key]) for key in first)


def test_a_score_drops_nothing_and_leaves_dropout_as_it_was() -> None:
    model = tiny_model("llama")
    add_lora(model, dropout=0.5)
    with_dropout = score(model, THREE, head_chunk=8)
    assert all(module.training for module in model.modules())
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module._p_1 = 1.0
    assert np.array_equal(with_dropout, score(model, THREE, head_chunk=8))


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_a_batch_without_targets_adds_nothing(path: GradientPath) -> None:
    model = lora_llama()
    empty = padded_rows(7, (12, 5), (0, 0), VOCABULARY)
    sums, got = gathered(backward(model, [empty], sft, head_chunk=8, path=path))
    assert np.array_equal(sums[0], [0, 0])
    assert all(not np.array(value).any() for value in got.values())
    assert np.array_equal(score(model, empty, head_chunk=8, path=path), [0, 0])


@pytest.mark.parametrize("path", [WHOLE, FULL_HEAD, SEGMENTS[0]], ids=name)
@pytest.mark.parametrize("id_", [-1, VOCABULARY])
def test_a_token_outside_of_the_vocabulary_is_refused(path: GradientPath, id_: int) -> None:
    model = lora_llama()
    wrong = MicroBatch(np.array([[1, 2, 3]]), np.array([[2, 3, id_]]), np.ones((1, 3)))
    works: list[Callable[[], object]] = [
        lambda: score(model, wrong, head_chunk=8, path=path),
        lambda: gathered(backward(model, [wrong], sft, head_chunk=8, path=path)),
    ]
    for work in works:
        with pytest.raises(DataError, match=r"vocabulary|negative"):
            work()


@pytest.mark.parametrize("path", SEGMENTS, ids=name)
def test_gradients_become_final_from_the_top_layer_down_and_stay_as_they_were_given(path: GradientPath) -> None:
    model = lora_llama()
    events = backward(model, [CHOSEN, REJECTED], dpo, head_chunk=8, path=path)
    given = [event.gradients for event in events if isinstance(event, FinalPart)]
    _, got = gathered(backward(model, [CHOSEN, REJECTED], dpo, head_chunk=8, path=path))
    layers = [{int(key.split(".")[2]) for key in part} for part in given]
    assert all(min(upper) > max(lower) for upper, lower in itertools.pairwise(layers))
    assert len(layers) == -(-4 // path.segment_size)
    everything = {key: value for part in given for key, value in part.items()}
    assert everything.keys() == got.keys()
    assert all(np.array_equal(everything[key], got[key]) for key in got)


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_the_row_sums_come_first_and_then_every_gradient_once(path: GradientPath) -> None:
    model = lora_llama()
    events = backward(model, [CHOSEN, REJECTED], dpo, head_chunk=8, path=path)
    first, *parts = [event for event in events if not isinstance(event, Computing)]
    sums, got = gathered(backward(model, [CHOSEN, REJECTED], dpo, head_chunk=8, path=path))
    assert isinstance(first, RowSums)
    assert all(np.array_equal(one, other) for one, other in zip(first.sums, sums, strict=True))
    names = [key for part in parts if isinstance(part, FinalPart) for key in part.gradients]
    assert sorted(names) == sorted(got)


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_the_time_to_build_comes_once_before_the_last_gradients(path: GradientPath) -> None:
    events = list(backward(lora_llama(), [CHOSEN, REJECTED], dpo, head_chunk=8, path=path))
    kinds = [type(event) for event in events]
    assert kinds.count(Computing) == 1
    assert Computing in kinds[:-1]
    assert kinds[kinds.index(Computing) + 1 :].count(FinalPart) == 1


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_a_backward_has_the_same_bits_when_another_is_built_in_its_time(path: GradientPath) -> None:
    model = tiny_model("llama")
    add_lora(model, dropout=0.3)

    def built(batch: MicroBatch, key: int) -> Events:
        return backward(model, [batch], sft, head_chunk=8, path=path, dropout_key=key)

    expected = [gathered(built(batch, key)) for key, batch in enumerate((THREE, CHOSEN))]
    ahead: list[Events] = []

    def first() -> Events:
        for event in built(THREE, 0):
            if isinstance(event, Computing):
                ahead.append(built(CHOSEN, 1))
            yield event

    found = [gathered(first()), gathered(ahead[0])]
    for (sums, gradients), (again, got) in zip(expected, found, strict=True):
        assert np.array_equal(sums[0], again[0])
        assert all(np.array_equal(gradients[key], got[key]) for key in gradients)


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_what_is_built_computes_nothing_and_replaces_nothing_until_it_is_taken(path: GradientPath) -> None:
    model = lora_llama()
    before, call = plain_parameters(model), type(model.layers[0]).__call__
    mx.eval(before)
    gathered(backward(model, [THREE], sft, head_chunk=8, path=path))
    mx.clear_cache()
    held = mx.get_active_memory()
    events = backward(model, [THREE], sft, head_chunk=8, path=path)
    assert type(model.layers[0]).__call__ is call
    assert all(value is before[key] for key, value in plain_parameters(model).items())
    assert mx.get_active_memory() - held < 10_000, "token ids and numbers"
    del events
    assert mx.get_active_memory() <= held


def test_a_backward_that_is_closed_while_the_device_computes_leaves_nothing_running() -> None:
    model = lora_llama()
    parameters = plain_parameters(model)
    mx.eval(parameters)
    mx.clear_cache()
    held = mx.get_active_memory()
    for path in PATHS:
        events = backward(model, [THREE], sft, head_chunk=8, path=path)
        assert any(isinstance(event, Computing) for event in events)
        events.close()
        assert mx.get_active_memory() <= held


@pytest.mark.parametrize("taken", [1, 2])
def test_a_backward_that_is_closed_early_leaves_the_model_as_it_was_and_holds_nothing(taken: int) -> None:
    model = lora_llama()
    before, call = plain_parameters(model), type(model.layers[0]).__call__
    mx.eval(before)
    mx.clear_cache()
    held = mx.get_active_memory()
    events = backward(model, [THREE], sft, head_chunk=8, path=SEGMENTS[0])
    for _ in range(taken):
        next(events)
    events.close()
    after = plain_parameters(model)
    assert all(after[key] is before[key] for key in before)
    assert type(model.layers[0]).__call__ is call
    assert mx.get_active_memory() <= held


def test_a_part_that_was_yielded_is_held_by_its_reader_alone() -> None:
    """So a reader that keeps nothing frees each layer's gradients before the next layer computes."""
    alone = {"array": mx.array(1.0)}
    for event in backward(lora_llama(), [THREE], sft, head_chunk=8, path=SEGMENTS[0]):
        if isinstance(event, FinalPart):
            for key in event.gradients:
                assert sys.getrefcount(event.gradients[key]) == sys.getrefcount(alone["array"])


def test_the_parameters_are_as_before() -> None:
    model = lora_llama()
    before = {key: np.array(value) for key, value in plain_parameters(model).items()}
    for path in PATHS:
        gathered(backward(model, [THREE], sft, head_chunk=8, path=path))
        score(model, THREE, head_chunk=8, path=path)
        after = plain_parameters(model)
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[key], after[key]) for key in before)


def plain_parameters(model: nn.Module) -> dict[str, mx.array]:
    from mlx.utils import tree_flatten

    return dict(tree_flatten(model.parameters()))
