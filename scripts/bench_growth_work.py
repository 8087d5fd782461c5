"""The works of scripts/bench_growth.py: what a node and a coordinator do with n tokens or n rows.

This module imports mlx, so OpenBLAS and the environment must be set before.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np

from mlxdist.coordinator.batch.batch_order import Step, epochs
from mlxdist.coordinator.batch.leaf_tokens import auto_leaf_tokens, longest_item
from mlxdist.coordinator.batch.micro_batches import cut
from mlxdist.coordinator.batch.row_store import RowStore, StoredRows
from mlxdist.coordinator.batch.row_store import pack as pack_words
from mlxdist.coordinator.config.schema import BatchConfig, DataConfig, RunConfig
from mlxdist.coordinator.data.ingest import ReadFile, draft
from mlxdist.coordinator.encode.chat_template import ChatTemplate
from mlxdist.coordinator.encode.encoding import Encoding
from mlxdist.coordinator.encode.long_texts import encode_all
from mlxdist.coordinator.encode.remarks import Tally
from mlxdist.coordinator.encode.tokenizer import hub_tokenizer
from mlxdist.coordinator.inspect.facts import batch_facts, file_facts
from mlxdist.coordinator.schedule.assign import NodeSeconds, assign
from mlxdist.node.backward.backward import GradientPath
from mlxdist.node.backward.layout import pack
from mlxdist.node.selfcheck import models
from mlxdist.node.selfcheck.gradients import TOGETHER, leaf_gradient
from mlxdist.node.selfcheck.rows import pairs_leaf, rows_leaf
from mlxdist.node.work.objective import passes
from mlxdist.protocol.leaves import Leaf, pack_leaf, unpack_leaf
from mlxdist.protocol.messages import LeafRows, SessionId
from mlxdist.protocol.tree import Span, TreeSum

Run = Callable[[], object]  # does its work to the end
Prepare = Callable[[int], Run]

LAYERS, HEAD_DIM, VOCABULARY, HEAD_CHUNK = 2, 32, 512, 128
SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 128,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 256,
        "num_attention_heads": 1,  # few scores: their memory grows with the square of a row
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
    }
)
ROW, SHORT = 64, 8  # tokens of the rows where their number grows
TURN_WORDS = 12
MAX_LENGTH = 1 << 20
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Work:
    """What is measured at growing sizes, and the same of the attention in it, which grows with the square of a row."""

    prepare: Prepare  # for a size; what it does is not measured
    unit: str
    attention: Prepare | None = None  # nothing else of a leaf may grow faster than linearly


def node_works() -> dict[str, Work]:
    """Returns the gradients of leaves."""
    whole, cut_up = GradientPath(), GradientPath(segment_size=1)
    return {
        "gradient of one row, whole graph": Work(partial(one_row, whole), "tokens", partial(attention, True)),
        "gradient of one row, segment 1": Work(partial(one_row, cut_up), "tokens", partial(attention, False)),
        f"gradient of rows of {ROW} tokens, packed": Work(partial(rows, ROW, whole), "tokens"),
        f"gradient of rows of {SHORT} tokens, packed": Work(partial(rows, SHORT, whole), "tokens"),
        f"gradient of rows of {SHORT} tokens, packed, segment 1": Work(partial(rows, SHORT, cut_up), "tokens"),
        "gradient of pairs of 40 + 12 + 12 tokens": Work(pairs, "tokens"),
        "gradient of a hybrid's row, in chunks": Work(
            hybrid_row, "tokens", partial(attention, True, layers=1, heads=4)
        ),
        f"packing rows of {SHORT} tokens into a leaf": Work(packing, "tokens"),
    }


def coordinator_works(tokenizer: Any) -> dict[str, Work]:
    """Returns the work beside the gradients: from rows to leaves, and from partials to a sum."""
    return {
        "encoding one answer": Work(partial(encoded, tokenizer, 1), "words"),
        "encoding one conversation, all turns trained": Work(partial(encoded, tokenizer, None), "words"),
        "the order of an epoch": Work(order, "rows"),
        "leaves of a batch": Work(leaves, "rows"),
        "leaf_tokens and the longest item": Work(leaf_size, "rows"),
        "inspecting rows": Work(inspected, "rows"),
        "a leaf to bytes and back": Work(wire, "rows"),
        "adding partials": Work(reduced, "leaves"),
        "splitting leaves over 8 nodes": Work(split, "leaves"),
    }


def one_row(path: GradientPath, tokens: int) -> Run:
    """The gradient of one row."""
    return _gradient(models.dense(**SIZES), rows_leaf([tokens + 1], VOCABULARY), path)


def rows(length: int, path: GradientPath, tokens: int) -> Run:
    """The gradient of rows of `length` inputs, packed: their attention grows with their number."""
    return _gradient(models.dense(**SIZES), rows_leaf([length + 1] * (tokens // length), VOCABULARY), path)


def pairs(tokens: int) -> Run:
    """The gradient of packed pairs that share prompts."""
    return _gradient(models.dense(**SIZES), pairs_leaf(max(tokens // 64, 1), 40, 12, VOCABULARY), GradientPath())


def hybrid_row(tokens: int) -> Run:
    """The gradient of one row of a hybrid of three gated-delta layers and one with attention."""
    model = models.hybrid(vocab_size=VOCABULARY)
    return _gradient(model, rows_leaf([tokens + 1], VOCABULARY), GradientPath(chunked=True))


def attention(whole: bool, tokens: int, layers: int = LAYERS, heads: int = 1) -> Run:
    """The attention of all layers alone, forward and backward: in one graph, or one layer at a time."""
    q, k, v = (mx.random.normal((1, heads, tokens, HEAD_DIM), key=key) for key in mx.random.split(mx.random.key(0), 3))
    mx.eval(q, k, v)

    def one(x: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(x, k, v, scale=1.0, mask="causal")

    def chain(x: mx.array, k: mx.array, v: mx.array) -> list[mx.array]:
        for _ in range(layers):
            x = one(x, k, v)
        return [x]

    def run() -> None:
        if whole:
            mx.eval(mx.vjp(chain, [q, k, v], [q]))
            return
        for _ in range(layers):
            mx.eval(one(q, k, v))  # the forward pass that keeps no graph
        for _ in range(layers):
            mx.eval(mx.vjp(lambda *given: [one(*given)], [q, k, v], [q]))

    return run


def packing(tokens: int) -> Run:
    """The layout of a leaf's rows."""
    leaf = rows_leaf([SHORT + 1] * (tokens // SHORT), VOCABULARY)
    items = [(row,) for row in leaf.rows]
    return lambda: mx.eval(pack(items).inputs)


def encoded(tokenizer: Any, turns: int | None, words: int) -> Run:
    """A row of messages to tokens: one answer of so many words, or turns of a few words, each answer trained."""
    count = max(words // TURN_WORDS, 2) // 2 * 2 if turns is None else 2 * turns
    drawn = np.random.default_rng(0).integers(0, 1000, words).tolist()
    texts = [" ".join(f"word{number}" for number in part) for part in np.array_split(drawn, count)]
    messages = [
        {"role": "assistant" if place % 2 else "user", "content": text or "word"} for place, text in enumerate(texts)
    ]
    config = RunConfig(
        model="none",
        output=Path("runs"),
        data=DataConfig(path="", train_on="all"),
        batch=BatchConfig(max_length=MAX_LENGTH),
    )
    encoding = Encoding(config, tokenizer, ChatTemplate(_chatml()))

    def run() -> object:
        made = draft("messages", {"messages": messages}, encoding)
        return made.finish(encode_all(tokenizer, made.texts))

    return run


def order(count: int) -> Run:
    """The windows of the second epoch."""
    lengths = np.random.default_rng(0).integers(10, 1000, count).tolist()

    def run() -> object:
        made = epochs(lengths, 8, order="shuffled", remainder="drop", seed=1)
        return next(made), next(made)

    return run


def leaves(count: int) -> Run:
    """The leaves of one step of so many rows."""
    data = StoredRows(stored(count))
    step = Step(1, (tuple(range(count)),))
    return lambda: cut(step, data, 512)


def leaf_size(count: int) -> Run:
    """What `leaf_tokens = "auto"` and the memory of a run look at."""
    data, batch = StoredRows(stored(count)), BatchConfig(size=min(count, 4096), max_length=1024)
    return lambda: (auto_leaf_tokens(data, batch, "sft"), longest_item(data, 1024))


def inspected(count: int) -> Run:
    """The facts of `mlxdist inspect` on so many rows."""
    store = stored(count)
    config = RunConfig(
        model="none", output=Path("runs"), data=DataConfig(path=""), batch=BatchConfig(size=8, max_length=1024)
    )
    file = ReadFile(store, (), count, "text", False, Tally(), "", {}, {})
    return lambda: (file_facts("train", file, config), batch_facts(StoredRows(store), config))


def wire(count: int) -> Run:
    """The payload of a leaf, made and read."""
    leaf = rows_leaf([ROW] * count, VOCABULARY)
    ids, lengths = [row.row_id for row in leaf.rows], [len(row.ids) for row in leaf.rows]
    message = LeafRows(SessionId("run", 1, "session"), 1, 1, 0, 1, ids, lengths)
    return lambda: unpack_leaf(message, memoryview(pack_leaf(leaf)))


def reduced(count: int) -> Run:
    """The sum of so many partials of one leaf each, of which every second pair comes in the wrong order."""
    vectors = np.ones((count, 64), np.float32)
    arrival = [place ^ 1 if place // 2 % 2 and place ^ 1 < count else place for place in range(count)]

    def run() -> object:
        total: TreeSum[Any] = TreeSum(count, np.add)
        for leaf in arrival:
            total.put(Span(leaf, leaf + 1), vectors[leaf])
        return total.result

    return run


def split(count: int) -> Run:
    """The spans of so many leaves over eight nodes of different speeds."""
    nodes = {f"mini-{place}": NodeSeconds([1.0 + place / 8] * count, 0.1) for place in range(8)}
    return lambda: assign(nodes)


def stored(count: int) -> RowStore:
    """Returns so many random rows of 10 to 120 tokens as a run keeps them."""
    random = np.random.default_rng(0)
    store = RowStore("train.jsonl", "sft", 1024)
    for line in range(count):
        ids = random.integers(0, VOCABULARY, int(random.integers(10, 120))).tolist()
        store.add(line + 1, [pack_words(ids, [(1, len(ids))])], len(ids))
    return store


def _gradient(model: Any, leaf: Leaf, path: GradientPath) -> Run:
    batches = passes(leaf, TOGETHER)
    return lambda: leaf_gradient(model, batches, path, HEAD_CHUNK)


def tiny_tokenizer() -> Any:
    """Returns a byte-level BPE tokenizer of 1,000 merges with the two tokens of ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1256,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([f"word{number} user assistant" for number in range(1000)], trainer)
    return hub_tokenizer(PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>"))


def _chatml() -> Any:
    from jinja2 import Environment

    template = Environment().from_string(CHATML)
    return lambda messages, **given: template.render(messages=messages, **given)
