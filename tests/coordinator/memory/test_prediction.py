import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxdist.coordinator.memory.prediction import (
    CHUNKS,
    WHOLE_GRAPH,
    LeafSize,
    ModelShape,
    choose,
    largest_length,
    model_shape,
    peak,
)
from mlxdist.node.backward.backward import GradientPath, backward
from mlxdist.node.backward.events import gathered
from mlxdist.node.backward.layout import pack
from mlxdist.node.backward.parameters import trainable
from mlxdist.protocol.leaves import Row
from scripts.bench_memory import law_bytes, one_layer
from scripts.check_memory_model import measure
from scripts.tiny_architectures import add_lora, tiny_model

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "vocab_size": 8192,
    "layer_types": None,
    "dtype": "float32",
}
SHAPE = model_shape(CONFIG)
SMALL_MAC = 10.7e9
SHAPES = st.builds(
    ModelShape,
    layers=st.integers(1, 80),
    hidden=st.sampled_from([576, 2048, 8192]),
    heads=st.sampled_from([8, 32]),
    query=st.sampled_from([576, 4096]),
    key_value=st.sampled_from([192, 1024]),
    expanded=st.sampled_from([1536, 14336]),
    vocabulary=st.sampled_from([32000, 262144]),
    half=st.booleans(),
)
LEAVES = st.builds(
    lambda length, share, rows, filled: LeafSize(
        length, max(length * rows, 2 * filled), max(1, int(length * share)) * rows, 10**7, filled
    ),
    length=st.integers(16, 32768),
    share=st.floats(0.01, 1),
    rows=st.integers(1, 8),
    filled=st.sampled_from([0, 64, 512]),
)


def measured(segment_size: int, rows: int, half: bool, length: int, chunk: int) -> tuple[int, int]:
    """Returns (peak above the model, prediction) of the gradient of one packed leaf in this process."""
    model = tiny_model("llama", **CONFIG)
    if half:
        model.set_dtype(mx.bfloat16)
    add_lora(model, rank=8)
    adapter = sum(value.size for value in trainable(model).values())
    drawn = np.random.default_rng(0).integers(1, 8192, (rows, length + 1), np.int32)
    leaf = [pack([(Row(0, ids, np.ones(length + 1, np.uint8)),) for ids in drawn])]
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    path = GradientPath(segment_size)
    gathered(backward(model, leaf, lambda sums: -sum(s.sum() for s in sums), head_chunk=chunk, path=path))
    above = mx.get_peak_memory() - before
    shape = model_shape({**CONFIG, "dtype": "bfloat16" if half else "float32"})
    size = LeafSize(length, rows * length, rows * length, adapter)
    return above, peak(shape, size, segment_size=segment_size, head_chunk=chunk)


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("segment_size", [WHOLE_GRAPH, 1, 2, 3])
def test_peak_memory_is_as_predicted_within_a_fifth(segment_size: int, rows: int, half: bool) -> None:
    above, predicted = measured(segment_size, rows, half, length=384, chunk=64)
    assert 0.8 < above / predicted < 1.2


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3_next", "kimi_linear"])
def test_a_hybrid_in_chunks_takes_what_is_predicted_within_a_fifth(architecture: str) -> None:
    ratios = measure(architecture)["ratios"]
    assert len(ratios) == 4
    assert all(0.8 < ratio < 1.2 for ratio in ratios.values()), ratios


def test_a_hybrid_in_chunks_is_predicted_far_below_the_recurrent_form_that_keeps_every_state() -> None:
    chunked = ModelShape(8, 512, 4, 512, 256, 1024, 1024, False, state_layers=8, state=65536, state_values=512)
    recurrent = replace(chunked, chunked=False)
    for segment_size in (WHOLE_GRAPH, 1):
        few, many = (
            peak(s, LeafSize(2048, 2048, 2048), segment_size=segment_size, head_chunk=64) for s in (chunked, recurrent)
        )
        assert many > 5 * few
        assert many - few > 2048 * chunked.state * 4


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("length", "chunk"), [(256, 128), (512, 32)])
def test_a_segment_of_one_layer_holds_no_more_than_a_layer_a_chunk_the_borders_and_the_adapter(
    rows: int, length: int, chunk: int
) -> None:
    """The reference is one layer under plain autograd, measured alone."""
    above, _ = measured(1, rows, False, length, chunk)
    model = tiny_model("llama", **CONFIG)
    add_lora(model, rank=8)
    layer = one_layer(model, length, hidden=128, rows=rows)
    parts = law_bytes(model, layer, length, rows, hidden=128, head_chunk=chunk, vocabulary=8192)
    assert above < 1.2 * parts
    whole, _ = measured(WHOLE_GRAPH, rows, False, length, chunk)
    assert whole > 1.2 * parts


def test_a_chunk_of_logits_is_all_that_the_head_holds() -> None:
    small, _ = measured(1, 1, False, length=384, chunk=8)
    large, _ = measured(1, 1, False, length=384, chunk=384)
    logits = 384 * 8192 * 4
    assert small < logits  # the layers alone, and less than one full matrix of logits
    assert logits < large < 1.3 * logits


@given(SHAPES, LEAVES, st.floats(1e8, 1e11))
def test_what_is_chosen_fits_and_the_whole_graph_is_taken_where_it_does(
    shape: ModelShape, leaf: LeafSize, free: float
) -> None:
    chosen = choose(shape, leaf, free)
    if chosen is None:
        assert all(peak(shape, leaf, segment_size=1, head_chunk=chunk) > free for chunk in CHUNKS[-1:])
        return
    assert chosen.peak == peak(shape, leaf, segment_size=chosen.segment_size, head_chunk=chosen.head_chunk) <= free
    if chosen.segment_size != WHOLE_GRAPH:
        assert choose(shape, leaf, free, segment_size=WHOLE_GRAPH) is None


@given(SHAPES, LEAVES, st.floats(1e8, 1e11))
def test_the_largest_length_fits_and_the_next_one_does_not(shape: ModelShape, leaf: LeafSize, free: float) -> None:
    found = largest_length(shape, leaf, free)
    assert 0 <= found <= leaf.length

    def fits(length: int) -> bool:
        return choose(shape, leaf.shorter(length), free) is not None

    assert found == 0 or fits(found)
    assert found == leaf.length or not fits(found + 1)


def test_what_the_user_asks_for_is_kept() -> None:
    leaf = LeafSize(1024, 1024, 1024)
    assert choose(SHAPE, leaf, SMALL_MAC, segment_size=4, head_chunk=100) is not None
    chosen = choose(SHAPE, leaf, SMALL_MAC, segment_size=4, head_chunk=100)
    assert (chosen.segment_size, chosen.head_chunk) == (4, 100) if chosen else False


def test_scores_come_to_dominate_with_the_length() -> None:
    one, two = (peak(SHAPE, LeafSize(length, length, 1), segment_size=1, head_chunk=64) for length in (8192, 16384))
    assert 3.5 < two / one < 4


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CONFIG, ModelShape(6, 128, 4, 128, 64, 384, 8192, half=False)),
        (
            {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 3, "vocab_size": 100},
            ModelShape(3, 64, 4, 64, 64, 256, 100, half=True, unmeasured="gpt2"),
        ),
        (
            {
                "model_type": "gemma4",
                "text_config": {
                    "model_type": "gemma4_text",
                    "hidden_size": 64,
                    "num_attention_heads": 8,
                    "num_key_value_heads": 1,
                    "head_dim": 32,
                    "num_hidden_layers": 5,
                    "intermediate_size": 128,
                    "vocab_size": 100,
                },
                "torch_dtype": "bfloat16",
            },
            ModelShape(5, 64, 8, 256, 32, 128, 100, half=True, heavier=1.7),
        ),
        (
            {
                "model_type": "qwen3_moe",
                "hidden_size": 64,
                "num_attention_heads": 4,
                "num_hidden_layers": 5,
                "intermediate_size": 999,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 32,
                "vocab_size": 100,
            },
            ModelShape(5, 64, 4, 64, 64, 256, 100, half=True),
        ),
        (
            {
                "model_type": "qwen3_next",
                "hidden_size": 64,
                "num_attention_heads": 4,
                "num_hidden_layers": 8,
                "intermediate_size": 128,
                "vocab_size": 100,
                "full_attention_interval": 4,
                "linear_num_value_heads": 8,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 32,
            },
            ModelShape(8, 64, 4, 64, 64, 128, 100, half=True, state_layers=6, state=4096, state_values=256),
        ),
    ],
)
def test_the_shape_is_read_from_config_json(config: dict[str, object], expected: ModelShape) -> None:
    assert model_shape(json.loads(json.dumps(config))) == expected


def test_a_configuration_without_sizes_is_refused_by_their_names() -> None:
    with pytest.raises(KeyError, match="num_hidden_layers"):
        model_shape({"hidden_size": 64, "vocab_size": 100})
