"""Predicts the memory of one leaf's backward pass, for "auto" and `mlxdist plan`.

Where the machines of a run have measured the model, by their law (measured.py); elsewhere from its configuration.

The form of the formulas is counted by hand: what a layer keeps for its backward pass. The coefficients were fitted to
peaks measured over 54 llama-like shapes (docs/memory.md compares both). MLX frees what nothing needs any more, so the
peak of a phase is what it holds at its widest moment.

Shapes: T tokens of a packed leaf, L of its longest row, P picked positions, D hidden size, V vocabulary. All results
are bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlxdist.coordinator.memory.measured import MeasuredModel

WHOLE_GRAPH = 0  # the segment size at which the activations of every layer are kept
AUTO_SEGMENT_SIZES = (WHOLE_GRAPH, 1)  # for "auto", fastest first; segments of 2 and more were no faster than 1
CHUNKS = (512, 256, 128, 64, 32)  # positions of the LM head at a time, for "auto"
ADAPTER_BYTES = 4  # adapters and their gradients are float32


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model on which the memory of its activations depends."""

    layers: int
    hidden: int  # D
    heads: int
    query: int  # features of all query heads
    key_value: int  # features of all key heads (and as many of the values)
    expanded: int  # features inside the MLP, for one token; with experts, of all experts that the token is sent to
    vocabulary: int  # V
    half: bool  # activations of 2 bytes, not 4
    heavier: float = 1.0  # times the memory of a llama of these sizes
    state_layers: int = 0  # layers of linear attention
    state: int = 0  # elements of the state that such a layer keeps for every position
    state_values: int = 0  # features of its values
    by_channel: bool = False  # its gates are one for each key feature, not one for each head
    chunked: bool = True  # it is trained in chunks of tokens, not token by token
    unmeasured: str = ""  # the name of an architecture that was not measured; it is predicted as a llama
    measured: tuple[MeasuredModel, ...] = ()  # the model on the machines of the run; without any, the table is used


@dataclass(frozen=True, slots=True)
class LeafSize:
    """The largest leaf of a run."""

    length: int  # L, tokens of its longest row, over which attention goes
    tokens: int  # T, of all of its rows; what a pair shares counts once
    picked: int  # P, targets of all rows
    adapter: int = 0  # trainable parameters
    leaf_tokens: int = 0  # tokens that short rows fill a leaf to; 0: the leaf shrinks with its longest row

    def shorter(self, length: int) -> "LeafSize":
        """Returns the largest leaf where no row is longer than `length` tokens, all of which are targets."""
        filled = min(length, self.leaf_tokens) + self.leaf_tokens
        tokens = min(max(length, length * self.tokens // self.length, filled), max(self.tokens, length))
        return replace(self, length=length, tokens=tokens, picked=tokens)


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """The values that "auto" stands for, and the memory that they lead to."""

    segment_size: int  # layers; 0 = the whole graph
    head_chunk: int  # positions
    peak: int  # predicted bytes above the model


@dataclass(frozen=True, slots=True)
class _Coefficients:
    """Bytes per position (of T) and feature; for scores per element of heads * T * L."""

    hidden: float
    expanded: float
    query: float
    key_value: float
    scores: float
    once_hidden: float  # these once per segment: what its backward needs beside what was kept
    once_expanded: float
    once_query: float
    once_scores: float
    logits: float  # bytes per element of a chunk of logits
    logits_in_graph: float  # the same where the whole graph is computed at once


# The additional memory of a layer with linear attention (the gated delta rule of qwen3_next). Trained token by token:
# bytes per element of the state and position, and per feature of the values and pair of positions.
_STATE_KEPT, _STATE_ONCE, _STATE_VALUES_ONCE = 4.0, 7.0, 1.2
# In chunks: bytes per feature of the values and position, kept; and of the block that is computed again, by its gates.
_CHUNKED_KEPT, _CHUNKED_ONCE, _BY_CHANNEL_ONCE = 57.0, 30.0, 150.0
_BLOCK = 256  # positions of a block; the state at the start of each is kept

# Measured architectures (scripts/check_memory_model.py): those that take as much as a llama of their sizes, within a
# fifth, and those that take more, because of attention scores in plain operations, several streams, or states.
_LIKE_LLAMA = ("kimi_linear", "lfm2", "llama", "mistral", "olmo_hybrid", "qwen2", "qwen3", "qwen3_5", "qwen3_next")
_HEAVIER = {
    "deepseek_v3": 1.3,
    "falcon_h1": 1.7,
    "gemma2": 1.4,
    "gemma3": 1.2,
    "gemma3n": 1.9,
    "gemma4": 1.7,
    "gpt_oss": 1.4,
    "mamba2": 2.9,
    "nemotron_h": 1.7,
}

# A half-precision model keeps more than half as much: its LoRA layers multiply float32 copies of their inputs.
_FLOAT32 = _Coefficients(12.1, 18.5, 13.1, 15.8, 4.2, 0.0, 0.0, 25.5, 6.3, 4.3, 10.8)
_HALF = _Coefficients(31.4, 11.9, 4.3, 5.5, 2.3, 2.4, 12.1, 14.2, 1.8, 6.2, 7.2)


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Returns the sizes in a model's config.json, of any architecture; those of a text_config inside it come first.

    Raises KeyError for a configuration without layers, hidden size or vocabulary.
    """
    text = {**config, **config.get("text_config", {})}
    hidden = _first(text, "hidden_size", "n_embd", "d_model", "model_dim")
    heads = _first(text, "num_attention_heads", "n_head", "n_heads", default=1)
    head_size = int(text.get("head_dim") or hidden // heads)
    kv_heads = _first(text, "num_key_value_heads", "n_kv_heads", default=heads)
    dense = _first(text, "intermediate_size", "ffn_hidden_size", "n_inner", "hidden_dim", default=4 * hidden)
    sent_to = _first(text, "num_experts_per_tok", "moe_topk", "moe_top_k", default=0)
    expert = _first(text, "moe_intermediate_size", "expert_ffn_hidden_size", default=dense)
    always = _first(text, "shared_expert_intermediate_size", default=0)
    always += _first(text, "n_shared_experts", "num_shared_experts", default=0) * expert
    architecture = str(text.get("model_type", ""))
    families = [family for family in (*_LIKE_LLAMA, *_HEAVIER) if architecture.startswith(family)]
    layers = _first(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    states, state_heads, state_keys, state_values = _linear_attention(text, layers)
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        query=heads * head_size,
        key_value=kv_heads * head_size,
        expanded=sent_to * expert + always if sent_to else dense,
        vocabulary=_first(text, "vocab_size"),
        half="32" not in str(text.get("dtype") or text.get("torch_dtype") or ""),
        heavier=_HEAVIER.get(max(families, key=len, default=""), 1.0),
        state_layers=states,
        state=state_heads * state_keys * state_values,
        state_values=state_heads * state_values,
        by_channel="linear_attn_config" in text,
        unmeasured="" if families else architecture or "model of unknown architecture",
    )


def peak(shape: ModelShape, leaf: LeafSize, *, segment_size: int, head_chunk: int) -> int:
    """Returns the peak bytes of one leaf's gradient, above model and adapter, on the machine that needs most."""
    if shape.measured:
        return max(_measured_peak(each, shape, leaf, segment_size, head_chunk) for each in shape.measured)
    element = 2 if shape.half else 4
    adapter = leaf.adapter * ADAPTER_BYTES
    head_states = leaf.picked * shape.hidden * element
    logits = min(head_chunk, leaf.picked) * shape.vocabulary
    if segment_size == WHOLE_GRAPH:
        kept = shape.layers * _kept(shape, leaf) + 2 * _once(shape, leaf)
        kept += _states_held(shape, leaf, shape.state_layers)
        if shape.chunked:  # in segments the largest layer counts, which is one with scores
            kept -= shape.state_layers * _scores(shape, _of(shape).scores, leaf.tokens, leaf.length)
        return round(kept + logits * _of(shape).logits_in_graph + 2 * head_states + adapter)
    size = min(segment_size, shape.layers)
    borders = (-(-shape.layers // size) - 1) * leaf.tokens * shape.hidden * element
    layers = size * _kept(shape, leaf) + _once(shape, leaf) + _states_held(shape, leaf, min(size, shape.state_layers))
    return round(borders + head_states + adapter + max(logits * _of(shape).logits, layers))


def _measured_peak(model: MeasuredModel, shape: ModelShape, leaf: LeafSize, segment_size: int, head_chunk: int) -> int:
    if segment_size == WHOLE_GRAPH:
        return round(model.whole(leaf.tokens, leaf.length, leaf.picked, head_chunk))
    borders = model.borders(segment_size) * leaf.tokens * shape.hidden * (2 if shape.half else 4)
    layers = model.segments(leaf.tokens, leaf.length, leaf.picked, head_chunk, segment_size)
    return round(borders + leaf.adapter * ADAPTER_BYTES + layers)


def choose(
    shape: ModelShape, leaf: LeafSize, free: float, *, segment_size: int | None = None, head_chunk: int | None = None
) -> MemorySettings | None:
    """Returns the fastest settings whose predicted peak is at most `free` bytes; None when nothing fits.

    `leaf` is the largest of the run, `free` is counted without the model. `segment_size` (layers) and `head_chunk`
    (positions) are the user's; None means "auto".
    """
    for size in AUTO_SEGMENT_SIZES if segment_size is None else (segment_size,):
        chunk = _chunk(shape, leaf, size) if head_chunk is None else head_chunk
        needed = peak(shape, leaf, segment_size=size, head_chunk=chunk)
        if needed <= free:
            return MemorySettings(size, chunk, needed)
    return None


def largest_length(shape: ModelShape, leaf: LeafSize, free: float, **asked: int | None) -> int:
    """Returns the length of the longest row at which `choose` finds settings, with the other rows as they are; 0: none.

    All of its tokens are targets.
    """
    low, high = 0, leaf.length
    while low < high:
        middle = (low + high + 1) // 2
        fits = choose(shape, leaf.shorter(middle), free, **asked) is not None
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _of(shape: ModelShape) -> _Coefficients:
    return _HALF if shape.half else _FLOAT32


def _kept(shape: ModelShape, leaf: LeafSize) -> float:
    """Returns the bytes that one layer keeps for its backward pass."""
    c = _of(shape)
    features = (
        c.hidden * shape.hidden + c.expanded * shape.expanded + c.query * shape.query + c.key_value * shape.key_value
    )
    scores = _scores(shape, c.scores, leaf.tokens, leaf.length)
    return shape.heavier * leaf.tokens * features + scores


def _scores(shape: ModelShape, each: float, tokens: int, length: int) -> float:
    """Returns the bytes of the scores of one layer, `each` bytes of an element, of `tokens` over `length` others."""
    return shape.heavier * each * shape.heads * tokens * length


def _once(shape: ModelShape, leaf: LeafSize) -> float:
    """Returns the additional bytes of a segment's backward pass at its widest moment."""
    c = _of(shape)
    features = c.once_hidden * shape.hidden + c.once_expanded * shape.expanded + c.once_query * shape.query
    scores = _scores(shape, c.once_scores, leaf.length, leaf.length)  # attention goes row by row
    return shape.heavier * leaf.tokens * features + scores


def _states_held(shape: ModelShape, leaf: LeafSize, layers: int) -> float:
    """Returns the additional bytes of `layers` layers of linear attention, with the one that is being computed."""
    if not layers:
        return 0.0
    if shape.chunked:
        kept = _CHUNKED_KEPT * shape.state_values + _STATE_KEPT * shape.state / _BLOCK
        inside = (_BY_CHANNEL_ONCE if shape.by_channel else _CHUNKED_ONCE) * shape.state_values
        return leaf.tokens * layers * kept + min(leaf.length, _BLOCK) * inside
    once = _STATE_ONCE * shape.state + _STATE_VALUES_ONCE * shape.state_values * leaf.length
    return leaf.tokens * (layers * _STATE_KEPT * shape.state + once)


def _chunk(shape: ModelShape, leaf: LeafSize, segment_size: int) -> int:
    """Returns the largest chunk whose logits take no more than the layers take anyway."""
    size = segment_size or 1
    if shape.measured:
        return min(_measured_chunk(each, leaf, size) for each in shape.measured)
    layers = size * _kept(shape, leaf) + _once(shape, leaf) + _states_held(shape, leaf, min(size, shape.state_layers))
    fitting = (chunk for chunk in CHUNKS if chunk * shape.vocabulary * _of(shape).logits <= layers)
    return next(fitting, CHUNKS[-1])


def _measured_chunk(model: MeasuredModel, leaf: LeafSize, size: int) -> int:
    layers = model.segment(leaf.tokens, leaf.length, size)
    return next((chunk for chunk in CHUNKS if model.head_bytes(leaf.picked, chunk) <= layers), CHUNKS[-1])


def _linear_attention(text: Mapping[str, Any], layers: int) -> tuple[int, int, int, int]:
    """Returns the number of layers with linear attention, and its heads, key features and value features; or zeros."""
    if kimi := text.get("linear_attn_config"):
        return len(kimi["kda_layers"]), int(kimi["num_heads"]), int(kimi["head_dim"]), int(kimi["head_dim"])
    names = ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    heads, keys, values = (_first(text, name, default=0) for name in names)
    full = _first(text, "full_attention_interval", default=0)
    count = layers - layers // full if full else layers
    if kinds := text.get("layer_types"):
        count = list(kinds).count("linear_attention")
    return (count, heads, keys, values) if heads else (0, 0, 0, 0)


def _first(values: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        value = values.get(name)
        if isinstance(value, (int, float)):
            return int(value)
    if default is None:
        raise KeyError(f"the model's config.json has none of {', '.join(names)}")
    return default
