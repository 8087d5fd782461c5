import mlx.core as mx
import pytest

from mlxdist.node.backward.backward import GradientPath, backward
from mlxdist.node.backward.choose_path import choose_path
from mlxdist.node.backward.events import gathered
from scripts.plain_gradient import furthest, padded_rows, plain_gradient
from scripts.tiny_architectures import VOCABULARY, add_lora, architectures, tiny_model

NAMES = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5",
    "gemma2",
    "gemma3_text",
    "gemma3n",
    "gemma4",
    "ministral3",
    "mixtral",
    "phi3",
    "olmoe",
    "gpt_oss",
    "deepseek_v2",
    "mamba2",
    "lfm2",
    "granitemoehybrid",
]
ROWS = padded_rows(1, (37, 12), (25, 3), VOCABULARY)


def loss(sums: list[mx.array]) -> mx.array:
    return (sums[0] * sums[0]).sum() / 100 - sums[0].sum()


@pytest.mark.parametrize("architecture", NAMES)
def test_segmented_backward_equals_whole_graph(architecture: str) -> None:
    model = tiny_model(architecture)
    assert len(add_lora(model)) >= 2 * len(model.layers)
    _, expected = plain_gradient(model, [ROWS], loss)
    for size in (1, 3):
        path = GradientPath(segment_size=size)
        assert choose_path(model, segment_size=size) == path
        assert furthest(gathered(backward(model, [ROWS], loss, head_chunk=8, path=path))[1], expected) < 1e-5
    assert furthest(gathered(backward(model, [ROWS], loss, head_chunk=8))[1], expected) < 1e-5


@pytest.mark.parametrize(("architecture", "checkpoint"), [("iquestloopcoder", True), ("kimi_k3", False)])
def test_what_cannot_be_cut_in_segments_takes_the_next_best_path(architecture: str, checkpoint: bool) -> None:
    model = tiny_model(architecture)
    add_lora(model)
    path = choose_path(model, segment_size=1)
    assert (path.segment_size, path.checkpoint) == (0, checkpoint)
    assert ("grad_checkpoint is used" in path.reason) == checkpoint
    _, expected = plain_gradient(model, [ROWS], loss)
    assert furthest(gathered(backward(model, [ROWS], loss, head_chunk=8, path=path))[1], expected) < 1e-5


def test_every_architecture_of_mlx_lm_has_a_tiny_configuration() -> None:
    """A new mlx-lm that brings another architecture is noticed here."""
    assert len(list(architectures())) == 125
