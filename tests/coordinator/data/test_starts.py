"""The ids of many starts of one text are those of each start alone, for work and memory that grow as the text does."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxdist.coordinator.encode.assistant_spans import rendered
from mlxdist.coordinator.encode.boundaries import common_prefix
from mlxdist.coordinator.encode.chat_template import ChatTemplate
from mlxdist.coordinator.encode.many_turns import turns
from mlxdist.coordinator.encode.sft import draft_sft
from mlxdist.coordinator.encode.starts import FEW, Start, starts_of
from tests.coordinator.data.chat_templates import CHATML, FAMILIES, SpecialTokenizer, jinja
from tests.coordinator.data.data_toys import ToyTokenizer, toy_config, toy_encoding
from tests.coordinator.data.test_long_texts import KINDS

PARTS = [
    "12",
    "ab c",
    " c",
    "\n",
    "\n\n ab",
    "<",
    "</s>",
    ".\n",
    "Ж",
    "東京",
    " " * 90,
    "<|im_end|>",
    "x" * 70,
    "7" * 66,
]


def check(text: str, starts: Sequence[Start], tokenizer: Any) -> None:
    """Asserts that each start shares as many tokens with the text as when it is encoded by itself."""
    made = starts_of(text, starts, tokenizer)
    ids = tokenizer.encode_batch(made.texts)
    found = list(made.found(ids, tokenizer))
    assert ids[0] == tokenizer.encode(text)
    for start, each in zip(starts, found, strict=True):
        alone = tokenizer.encode(text[: start.end] + start.more)
        shared = common_prefix(ids[0], alone)
        assert each.shared(ids[0]) == shared, (text[: start.end][-20:], start.more)
        assert list(each.behind(shared)) == alone[shared:]


@pytest.mark.parametrize("kind", [*KINDS, "special tokens"])
@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(PARTS), min_size=FEW + 4, max_size=40), st.lists(st.sampled_from(["", "", "\n", "<t"])))
def test_every_start_of_any_text_has_the_tokens_that_it_has_alone(kind: str, parts: list[str], more: list[str]) -> None:
    tokenizer = SpecialTokenizer() if kind == "special tokens" else tokenizer_of(kind)
    ends = [len("".join(parts[:count])) for count in range(1, len(parts) + 1)]
    added = [*more, *[""] * len(ends)]
    check("".join(parts), [Start(end, add) for end, add in zip(ends, added, strict=False)], tokenizer)


MADE: dict[str, Any] = {}


def tokenizer_of(kind: str) -> Any:
    if kind not in MADE:
        MADE[kind] = KINDS[kind]()
    return MADE[kind]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_turns_of_every_family_have_the_tokens_that_they_have_one_by_one(name: str) -> None:
    messages = [
        {"role": ("user", "assistant")[place % 2], "content": PARTS[place % 9] + f" words of {place}."}
        for place in range(2 * FEW)
    ]
    whole = rendered(messages, ChatTemplate(jinja(FAMILIES[name].source)), {})
    found = turns(whole, range(1, len(messages), 2))
    check(whole.text, [start for each in found for start in (Start(each.start, each.more), Start(each.end))], SPECIAL)


SPECIAL = SpecialTokenizer()


@dataclass(frozen=True)
class Counting(SpecialTokenizer):
    """Counts the characters that it is given."""

    given: list[int] = field(default_factory=list)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        self.given.append(sum(map(len, texts)))
        return super().encode_batch(texts)

    def encode(self, text: str) -> list[int]:
        self.given.append(len(text))
        return super().encode(text)


def test_the_characters_that_are_held_and_encoded_grow_as_the_turns_do() -> None:
    held, encoded = [], []
    for count in (40, 80, 160):
        tokenizer = Counting()
        encoding = toy_encoding(toy_config("rows", max_length=10**6, train_on="all"), tokenizer, jinja(CHATML))
        messages = [
            {"role": ("user", "assistant")[place % 2], "content": f"some words of turn {place}."}
            for place in range(2 * count)
        ]
        draft = draft_sft("messages", {"messages": messages}, encoding)
        draft.finish(tokenizer.encode_batch(draft.texts))
        held.append(sum(map(len, draft.texts)))
        encoded.append(sum(tokenizer.given))
        assert held[-1] < 2.1 * len(draft.texts[0])
    for counts in (held, encoded):
        assert all(2 * few * 1.1 > many for few, many in pairwise(counts))


@dataclass(frozen=True)
class ByLength(ToyTokenizer):
    """A tokenizer whose first token depends on the length of a long text: surroundings say nothing of it."""

    def encode(self, text: str) -> list[int]:
        ids = super().encode(text)
        return [len(text), *ids] if len(text) > 200 else ids


def test_a_text_whose_cuts_change_a_token_after_all_is_encoded_whole() -> None:
    text = "ab c." * 100
    check(text, [Start(end) for end in range(5, 500, 5)], ByLength())
