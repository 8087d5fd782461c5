"""The works of scripts/bench_growth.py at a coordinator: from rows to leaves, and from partials to a sum."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlxdist.coordinator.batch.batch_order import Step, epochs
from mlxdist.coordinator.batch.leaf_tokens import auto_leaf_tokens, longest_item
from mlxdist.coordinator.batch.micro_batches import cut
from mlxdist.coordinator.batch.row_store import RowStore, StoredRows, pack
from mlxdist.coordinator.config.schema import BatchConfig, DataConfig, RunConfig
from mlxdist.coordinator.data.ingest import ReadFile, draft
from mlxdist.coordinator.encode.chat_template import ChatTemplate
from mlxdist.coordinator.encode.encoding import Encoding
from mlxdist.coordinator.encode.long_texts import encode_all
from mlxdist.coordinator.encode.remarks import Tally
from mlxdist.coordinator.encode.tokenizer import hub_tokenizer
from mlxdist.coordinator.inspect.facts import batch_facts, file_facts
from mlxdist.coordinator.schedule.assign import NodeSeconds, assign
from mlxdist.node.selfcheck.rows import rows_leaf
from mlxdist.protocol.leaves import pack_leaf, unpack_leaf
from mlxdist.protocol.messages import LeafRows, SessionId
from mlxdist.protocol.tree import Span, TreeSum
from scripts.bench_growth_leaves import ROW, VOCABULARY, Run, Work

TURN_WORDS = 12
MAX_LENGTH = 1 << 20
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def coordinator_works(tokenizer: Any) -> dict[str, Work]:
    """Returns the work of a coordinator, which loads no model."""
    return {
        "encoding one answer": Work(partial(encoded, tokenizer, 1), "words"),
        "encoding one conversation, all turns trained": Work(partial(encoded, tokenizer, None), "words"),
        "encoding one conversation of calls, all turns trained": Work(
            partial(encoded, tokenizer, None, calls=True), "words"
        ),
        "the order of an epoch": Work(order, "rows"),
        "leaves of a batch": Work(leaves, "rows"),
        "leaf_tokens and the longest item": Work(leaf_size, "rows"),
        "inspecting rows": Work(inspected, "rows"),
        "a leaf to bytes and back": Work(wire, "rows"),
        "adding partials": Work(reduced, "leaves"),
        "splitting leaves over 8 nodes": Work(split, "leaves"),
    }


def encoded(tokenizer: Any, turns: int | None, words: int, *, calls: bool = False) -> Run:
    """A row of messages to tokens: one answer of so many words, or turns of a few words, each answer trained.

    With `calls` each answer also calls a tool.
    """
    count = max(words // TURN_WORDS, 2) // 2 * 2 if turns is None else 2 * turns
    drawn = np.random.default_rng(0).integers(0, 1000, words).tolist()
    texts = [" ".join(f"word{number}" for number in part) for part in np.array_split(drawn, count)]
    call = {"tool_calls": [{"function": {"name": "add", "arguments": {"a": "1"}}}]} if calls else {}
    messages = [
        {"role": "assistant", "content": text or "word", **call} if place % 2 else {"role": "user", "content": text}
        for place, text in enumerate(texts)
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
    """The value of `leaf_tokens = "auto"`, and the longest item, which decides the memory of a run."""
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
        store.add(line + 1, [pack(ids, [(1, len(ids))])], len(ids))
    return store


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
