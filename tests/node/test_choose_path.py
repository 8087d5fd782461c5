import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxdist.node.backward.backward import GradientPath, backward
from mlxdist.node.backward.choose_path import choose_path
from mlxdist.node.backward.events import gathered
from mlxdist.protocol.errors import NodeError
from scripts.plain_gradient import furthest, padded_rows, plain_gradient
from scripts.tiny_architectures import VOCABULARY, add_lora, tiny_model

ROWS = padded_rows(3, (30, 9), (20, 4), VOCABULARY)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(16, 16)

    def __call__(self, x: mx.array) -> mx.array:
        return x + mx.tanh(self.up_proj(x))


class Plain(nn.Module):
    """A model of three blocks; the others below work in ways that hooks cannot follow everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.layers = [Block() for _ in range(3)]

    def through(self, h: mx.array) -> mx.array:
        for layer in self.layers:
            h = layer(h)
        return h

    def __call__(self, inputs: mx.array) -> mx.array:
        return self.embed.as_linear(self.through(self.embed(inputs)))


class ScalesBetween(Plain):
    def through(self, h: mx.array) -> mx.array:
        for layer in self.layers:
            h = layer(h * 0.5) * 3 + 0.1
        return h


class HeadSeesNeighbors(Plain):
    def __call__(self, inputs: mx.array) -> mx.array:
        h = self.through(self.embed(inputs))
        return self.embed.as_linear(mx.cumsum(h, axis=1))


class ReadsAnOlderLayer(Plain):
    def through(self, h: mx.array) -> mx.array:
        first = self.layers[0](h)
        return self.layers[2](self.layers[1](first) * 2 + first)


class NeverCallsLayers(Plain):
    def through(self, h: mx.array) -> mx.array:
        for layer in self.layers:
            h = h + layer.up_proj(h)
        return h


class CallsLayersTwice(Plain):
    def through(self, h: mx.array) -> mx.array:
        return super().through(super().through(h))


class CannotTrain(Plain):
    def through(self, h: mx.array) -> mx.array:
        raise RuntimeError("no kernel for this device")


def trained(kind: type[Plain]) -> Plain:
    mx.random.seed(1)
    model = kind()
    model.freeze()
    add_lora(model)
    return model


def equals_plain(model: nn.Module, path: GradientPath) -> bool:
    def loss(sums: list[mx.array]) -> mx.array:
        return -sums[0].sum()

    _, expected = plain_gradient(model, [ROWS], loss)
    return furthest(gathered(backward(model, [ROWS], loss, head_chunk=8, path=path))[1], expected) < 1e-5


@pytest.mark.parametrize("size", [0, 1, 2])
@pytest.mark.parametrize("kind", [Plain, ScalesBetween, CallsLayersTwice])
def test_a_model_that_agrees_takes_the_path_that_was_asked_for(kind: type[Plain], size: int) -> None:
    model = trained(kind)
    path = choose_path(model, segment_size=size)
    assert path == GradientPath(segment_size=size)
    assert equals_plain(model, path)


@pytest.mark.parametrize(
    ("kind", "word", "supervised_head"),
    [
        (HeadSeesNeighbors, "differs from plain autograd", False),
        (ReadsAnOlderLayer, "differs from plain autograd", True),
        (NeverCallsLayers, "never calls its layers", False),
    ],
)
def test_another_model_falls_back_and_says_why_in_one_sentence(
    kind: type[Plain], word: str, supervised_head: bool
) -> None:
    model = trained(kind)
    path = choose_path(model, segment_size=1)
    assert (path.segment_size, path.checkpoint, path.supervised_head) == (0, True, supervised_head)
    assert word in path.reason
    assert path.reason.endswith(".")
    assert "\n" not in path.reason
    assert equals_plain(model, path)


def test_without_segments_only_the_head_can_fall_back() -> None:
    model = trained(HeadSeesNeighbors)
    path = choose_path(model)
    assert (path.segment_size, path.checkpoint, path.supervised_head) == (0, False, False)
    assert "head" in path.reason
    assert equals_plain(model, path)


def test_parameters_outside_of_the_layers_take_the_whole_graph() -> None:
    model = trained(Plain)
    model.embed.unfreeze()
    path = choose_path(model, segment_size=1)
    assert (path.segment_size, path.supervised_head) == (0, False)
    assert "outside of the layers" in path.reason
    assert equals_plain(model, path)


def test_a_model_that_mlx_cannot_train_is_refused_with_its_own_words() -> None:
    with pytest.raises(NodeError, match="no kernel for this device"):
        choose_path(trained(CannotTrain))


def test_grad_checkpoint_can_be_asked_for() -> None:
    model = trained(Plain)
    path = choose_path(model, grad_checkpoint=True)
    assert path == GradientPath(checkpoint=True)
    assert equals_plain(model, path)


@pytest.mark.parametrize("kind", [mx.bfloat16, mx.float16])
def test_half_precision_and_dropout_pass_the_check(kind: mx.Dtype) -> None:
    model = tiny_model("llama")
    model.set_dtype(kind)
    add_lora(model, dropout=0.2)
    assert choose_path(model, segment_size=1) == GradientPath(segment_size=1)
