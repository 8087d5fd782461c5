"""mlx-lm's gated-delta layers train in chunks: while training only, guarded, and equal to mlx-lm's own form."""

import threading
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import gated_delta as home
from mlx_lm.models import qwen3_5, qwen3_next

from mlxdist.node.backward import chunked_layers as layers
from mlxdist.node.backward.backward import GradientPath, MicroBatch, backward, score
from mlxdist.node.backward.choose_path import choose_path
from mlxdist.node.backward.chunked_layers import NAME, chunked_layers, disagreement, has_gated_delta, unknown_form
from mlxdist.node.backward.events import gathered
from scripts.plain_gradient import furthest, padded_rows, plain_gradient
from scripts.tiny_architectures import VOCABULARY, add_lora, tiny_model

HYBRIDS = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear", "olmo_hybrid", "bailing_moe_v3", "kimi_k3"]
OTHERS = ["llama", "qwen3_moe", "mamba2", "jamba", "rwkv7", "deepseek_v3"]
ROWS = padded_rows(1, (90, 12), (70, 3), VOCABULARY)  # more than a chunk
CLOSE = 5e-5  # both forms are within 1e-6 of the exact rule; the norms of a tiny model enlarge that
STOCK: Any = vars(home)[NAME]


def loss(sums: list[mx.array]) -> mx.array:
    return (sums[0] * sums[0]).sum() / 100 - sums[0].sum()


def hybrid(architecture: str) -> nn.Module:
    model = tiny_model(architecture)
    add_lora(model)
    return model


def gradient(model: nn.Module, path: GradientPath, rows: MicroBatch = ROWS) -> dict[str, mx.array]:
    return gathered(backward(model, [rows], loss, head_chunk=8, path=path))[1]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each call of the chunked form."""
    calls: list[int] = []
    own = layers.gated_delta

    def counting(q: mx.array, *rest: Any) -> tuple[mx.array, mx.array]:
        calls.append(q.shape[1])
        return own(q, *rest)

    monkeypatch.setattr(layers, "gated_delta", counting)
    return calls


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_hybrid_trains_in_chunks_as_mlx_lm_trains_it(architecture: str, counted: list[int]) -> None:
    model = hybrid(architecture)
    _, expected = plain_gradient(model, [ROWS], loss)
    assert not counted
    for segment_size in (0, 1):
        path = choose_path(model, segment_size=segment_size, chunked=True)
        assert path.chunked
        assert "token by token" not in path.reason
        counted.clear()
        assert furthest(gradient(model, path), expected) < CLOSE
        assert set(counted) == {89}


@pytest.mark.parametrize("architecture", ["qwen3_next", "kimi_linear"])
def test_mlx_lms_checkpointing_and_dropout_work_with_chunks(architecture: str) -> None:
    model = hybrid(architecture)
    expected = gradient(model, GradientPath())
    assert furthest(gradient(model, GradientPath(checkpoint=True, chunked=True)), expected) < CLOSE


@pytest.mark.parametrize("segment_size", [0, 1])
def test_a_score_has_the_bits_of_a_gradients_row_sums(segment_size: int) -> None:
    """So that the rewards of a first DPO step are 0, and not almost 0."""
    model = hybrid("qwen3_next")
    path = GradientPath(segment_size=segment_size, chunked=True)
    sums, _ = gathered(backward(model, [ROWS], loss, head_chunk=8, path=path))
    assert mx.array_equal(score(model, ROWS, head_chunk=8, path=path), sums[0]).item()


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 63, 64, 65, 130])
def test_a_row_of_any_length_is_trained(tokens: int) -> None:
    model = hybrid("qwen3_5")
    rows = padded_rows(2, (tokens + 1, 1), (tokens + 1, 1), VOCABULARY)
    _, expected = plain_gradient(model, [rows], loss)
    assert furthest(gradient(model, GradientPath(chunked=True), rows), expected) < CLOSE


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_models_with_the_rule_are_told_from_those_without(architecture: str) -> None:
    assert has_gated_delta(tiny_model(architecture))


@pytest.mark.parametrize("architecture", OTHERS)
def test_a_model_without_the_rule_has_nothing_in_chunks(architecture: str) -> None:
    model = tiny_model(architecture)
    assert not has_gated_delta(model)


def test_another_model_takes_the_path_that_it_took() -> None:
    model = hybrid("llama")
    assert choose_path(model, segment_size=1, chunked=True) == GradientPath(segment_size=1)


def test_every_module_of_mlx_lm_that_has_the_function_gets_the_other_one_and_has_its_own_again() -> None:
    users = [import_module(f"mlx_lm.models.{name}") for name in (*HYBRIDS, "gated_delta") if name != "qwen3_5_moe"]
    with chunked_layers():
        ours = vars(home)[NAME]
        assert ours is not STOCK
        assert all(vars(user)[NAME] is ours for user in users)
    assert all(vars(user)[NAME] is STOCK for user in users)
    with pytest.raises(ZeroDivisionError), chunked_layers():
        raise ZeroDivisionError
    assert all(vars(user)[NAME] is STOCK for user in users)


def test_without_chunks_nothing_is_replaced() -> None:
    with chunked_layers(False):
        assert vars(qwen3_next)[NAME] is STOCK


def test_nothing_is_replaced_between_two_events_nor_after_an_early_end() -> None:
    events = backward(hybrid("qwen3_next"), [ROWS], loss, head_chunk=8, path=GradientPath(segment_size=1, chunked=True))
    for _ in events:
        assert vars(qwen3_next)[NAME] is STOCK
    events = backward(hybrid("qwen3_next"), [ROWS], loss, head_chunk=8, path=GradientPath(chunked=True))
    next(events)
    events.close()
    assert vars(qwen3_next)[NAME] is STOCK


def test_a_second_thread_waits_until_the_first_has_restored_the_function() -> None:
    inside, seen = threading.Event(), []

    def second() -> None:
        inside.wait()
        with chunked_layers():
            seen.append(vars(home)[NAME])

    thread = threading.Thread(target=second)
    thread.start()
    with chunked_layers():
        first = vars(home)[NAME]
        inside.set()
    thread.join()
    assert seen[0] is not first
    assert vars(qwen3_5)[NAME] is STOCK


def test_a_model_that_generates_runs_mlx_lms_own_code(counted: list[int]) -> None:
    model = hybrid("qwen3_5")
    model.eval()
    ids = mx.arange(1, 40)[None]
    expected = model(ids)
    with chunked_layers():
        assert mx.array_equal(model(ids), expected).item()
    assert not counted


# ---- the guard


def test_both_forms_agree_on_this_device_and_the_comparison_can_see_a_difference() -> None:
    assert not unknown_form()
    assert not disagreement(1e-5)
    assert "differs from mlx-lm's own by" in disagreement(1e-9)


def takes_more(q: mx.array, k: mx.array, *rest: mx.array, window: int = 0) -> None:
    """Another function of the same name, as a later mlx-lm may have it."""


def test_a_changed_signature_falls_back_with_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid("qwen3_next")
    expected = gradient(model, GradientPath())
    monkeypatch.setattr(home, NAME, takes_more)
    path = choose_path(model, segment_size=1, chunked=True)
    assert (path.segment_size, path.chunked) == (1, False)
    assert "token by token, which is slow" in path.reason
    assert "gated_delta_update(q, k, rest, window) of this mlx-lm takes other arguments" in path.reason
    assert path.reason.count(".") == 1
    assert furthest(gradient(model, path), expected) < CLOSE


def test_a_function_that_is_gone_falls_back_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid("qwen3_next")
    monkeypatch.delattr(home, NAME)
    path = choose_path(model, chunked=True)
    assert not path.chunked
    assert "mlx_lm.models.gated_delta has no gated_delta_update" in path.reason


@pytest.mark.parametrize("bug", ["values", "NaN", "error"])
def test_a_chunked_form_that_is_wrong_on_this_device_is_not_used(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = layers.gated_delta

    def wrong(*arguments: Any) -> tuple[mx.array, mx.array]:
        if bug == "error":
            raise RuntimeError("no kernel")
        y, state = own(*arguments)
        return y * (1.001 if bug == "values" else float("nan")), state

    model = hybrid("qwen3_next")
    expected = gradient(model, GradientPath())
    monkeypatch.setattr(layers, "gated_delta", wrong)
    path = choose_path(model, chunked=True)
    assert not path.chunked
    assert {"values": "differs from mlx-lm's own", "NaN": "nan", "error": "no kernel"}[bug] in path.reason
    assert furthest(gradient(model, path), expected) < CLOSE


def test_a_model_that_is_wrong_in_chunks_though_the_function_is_right_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that calls the function in a way that the comparison of the function alone does not have."""
    own = layers.gated_delta

    def wrong(q: mx.array, *rest: Any) -> tuple[mx.array, mx.array]:
        y, state = own(q, *rest)
        return (y * 1.01 if q.shape[1] < 60 else y), state

    model = hybrid("qwen3_next")
    monkeypatch.setattr(layers, "gated_delta", wrong)
    path = choose_path(model, chunked=True)
    assert not path.chunked
    assert "in chunks their gradient differs" in path.reason
