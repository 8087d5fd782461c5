"""A row of many megabytes: the same ids as ever, for work that grows as the row does and not faster."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mlxdist.coordinator.encode import long_texts
from mlxdist.coordinator.encode.long_texts import encode_all
from mlxdist.coordinator.encode.tokenizer import hub_tokenizer
from tests.coordinator.data.data_toys import ToyTokenizer, toy_read

PROSE = "The tower is 202 m high, finished in 2023, and was drawn in ink. <s> Grüße aus Köln, sagt 東京 tower!\n"
WORDS = "one two three four five six seven eight nine ten eleven twelve "


def trained(pre: Any, normalizer: Any = None) -> Any:
    """A small tokenizer of the given kind as `Tokenizer`."""
    fast = Fast(models.BPE(unk_token="<unk>", byte_fallback=False))
    if pre is not None:
        fast.pre_tokenizer = pre
    if normalizer is not None:
        fast.normalizer = normalizer
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    fast.train_from_iterator([PROSE, WORDS] * 20, trainer)
    return hub_tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>", unk_token="<unk>"))


KINDS: dict[str, Callable[[], Any]] = {
    "byte level": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "metaspace": lambda: trained(pre_tokenizers.Metaspace()),
    "whole texts with a prefix": lambda: trained(
        None, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ),
    "words": lambda: trained(pre_tokenizers.WhitespaceSplit()),
    "characters": ToyTokenizer,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_in_pieces_has_the_ids_of_the_whole_for_every_kind_of_tokenizer(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_texts, "PIECE", 300)
    tokenizer = KINDS[kind]()
    texts = [PROSE * 40, WORDS * 60, "x" * 3000, "東京" * 900, " " * 2000, (PROSE + "x" * 700) * 4, "short", ""]
    assert encode_all(tokenizer, [*texts, texts[0]]) == tokenizer.encode_batch([*texts, texts[0]])
    pieces = long_texts._pieces(tokenizer, WORDS * 60, 300, {})
    assert (len(pieces) > 10) == (kind != "whole texts with a prefix")


@pytest.mark.parametrize("kind", KINDS)
def test_starts_of_one_text_have_the_ids_of_each_whole_and_give_little_to_the_tokenizer(kind: str) -> None:
    tokenizer = KINDS[kind]()
    text = (PROSE + WORDS) * 180
    texts = [text[:size] for size in range(100, len(text), 700)]
    assert encode_all(tokenizer, texts) == tokenizer.encode_batch(texts)
    counting = Counting()
    encode_all(counting, texts)
    assert sum(counting.given) < 3 * len(texts) * long_texts.SMALL_PIECE < sum(map(len, texts)) / 4


@dataclass(frozen=True)
class Counting(ToyTokenizer):
    """Counts the characters that it is given."""

    given: list[int] = field(default_factory=list)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        self.given.append(sum(map(len, texts)))
        return super().encode_batch(texts)


def characters_given(folder: Path, row: Any, method: str = "sft", **values: Any) -> int:
    counting = Counting()
    toy_read(folder, [row], method, tokenizer=counting, max_cut=1.0, max_length=10**7, **values)
    return sum(counting.given)


@pytest.mark.parametrize("size", [2_000, 8_000])
def test_the_tokenizer_is_given_little_more_than_a_row_has_however_often_its_start_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(long_texts, "PIECE", 100)
    monkeypatch.setattr(long_texts, "AROUND", 16)
    text = (WORDS * size)[:size]
    asked, answered = {"role": "user", "content": text}, {"role": "assistant", "content": "yes"}
    rows: list[tuple[Any, str, dict[str, Any]]] = [
        ({"prompt": text, "completion": "a"}, "sft", {}),
        ({"prompt": text, "chosen": "a", "rejected": "b"}, "dpo", {}),
        ({"messages": [asked, answered] * 8}, "sft", {"train_on": "all"}),
    ]
    for row, method, values in rows:
        turns = 8 if "messages" in row else 1
        assert characters_given(tmp_path, row, method, **values) < 1.2 * turns * size + 300 * 4 * turns
