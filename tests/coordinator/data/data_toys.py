"""Toy tokenizers, templates and data files: small enough that a test can say every token."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from mlxdist.coordinator.config.schema import BatchConfig, DataConfig, RunConfig
from mlxdist.coordinator.data.load import Dataset, read_splits
from mlxdist.coordinator.data.sources import find
from mlxdist.coordinator.encode.chat_template import ChatTemplate, switches_of
from mlxdist.coordinator.encode.encoding import Encoding
from mlxdist.protocol.errors import DataError
from mlxdist.protocol.leaves import Row
from mlxdist.protocol.methods import METHODS

BOS, EOS, PAD = 1, 2, 0
SPECIAL = {"<s>": BOS, "</s>": EOS}
MERGES = {"ab": 9001, " c": 9002}


@dataclass(frozen=True)
class ToyTokenizer:
    """One id per character code but for two merges and the special tokens' own texts, greedy from the left."""

    bos_id: int | None = None
    eos_id: int | None = EOS
    pad_id: int = PAD
    pieces: dict[str, int] = field(default_factory=lambda: {**SPECIAL, **MERGES})

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset() if self.eos_id is None else frozenset({self.eos_id})

    def encode(self, text: str) -> list[int]:
        ids, place = [], 0
        while place < len(text):
            piece = next((piece for piece in self.pieces if text.startswith(piece, place)), text[place])
            ids.append(self.pieces.get(piece) or ord(piece))
            place += len(piece)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        names = {token: piece for piece, token in self.pieces.items()}
        return "".join(names.get(int(token)) or chr(token) for token in ids)


def toy_template(messages: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **kwargs: Any) -> str:
    """<role>content</> per message, <assistant> for a generation prompt; tools and other arguments shown in front."""
    assert not tokenize
    shown = {key: value for key, value in kwargs.items() if key != "enable_thinking"}
    text = f"{shown}" if shown else ""
    text += "".join(f"<{message['role']}>{message['content']}</>" for message in messages)
    return text + ("<assistant>" if add_generation_prompt else "")


def thinking_template(
    messages: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, enable_thinking: bool = True
) -> str:
    """As Qwen3's: thinking of turns before the last user turn is dropped, an empty one is put before the last turn."""
    last_user = max(place for place, message in enumerate(messages) if message["role"] == "user")
    text = ""
    for place, message in enumerate(messages):
        thought, _, said = message["content"].rpartition("</think>")
        thought = thought.removeprefix("<think>")
        think = f"<think>{thought}</think>" if message["role"] == "assistant" and place > last_user else ""
        text += f"<{message['role']}>{think}{said}</>"
    if add_generation_prompt:
        text += "<assistant>" + ("" if enable_thinking else "<think></think>")
    return text


def toy_config(path: Path | str, method: str = "sft", **values: Any) -> RunConfig:
    """A configuration with a method's defaults; `values` are of [data] and [batch], whichever has the key."""
    data = DataConfig(
        path=str(path), plain_text="raw"
    )  # the toys' texts stand as they are unless a test says otherwise
    batch = BatchConfig(size=1, order="sorted" if method == "sft" else "shuffled")
    assert METHODS[method].defaults.get("batch.order", "sorted") == batch.order
    for key, value in values.items():
        if hasattr(data, key):
            data = replace(data, **{key: value})
        else:
            batch = replace(batch, **{key: value})
    return RunConfig(model="toy", output=Path("runs"), data=data, batch=batch, method=method)  # type: ignore[arg-type]


def toy_encoding(
    config: RunConfig, tokenizer: ToyTokenizer | None = None, template: Callable[..., str] | None = toy_template
) -> Encoding:
    """The toys as a run's tokenizer and template."""
    chat = ChatTemplate(template, config.data.chat_template_kwargs, switches_of(getattr(template, "source", None)))
    return Encoding(config, tokenizer or ToyTokenizer(), chat)


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    """A .jsonl file of `rows`."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def toy_read(
    folder: Path,
    rows: Sequence[Any],
    method: str = "sft",
    *,
    tokenizer: ToyTokenizer | None = None,
    template: Callable[..., str] | None = toy_template,
    **values: Any,
) -> Dataset:
    """The data set of `rows`, read with the toys from a train.jsonl in `folder`."""
    config = toy_config(write_rows(folder / "train.jsonl", rows), method, **values)
    splits = find(config.data.path, config.data.valid_path)
    return read_splits(splits, toy_encoding(config, tokenizer, template), progress=lambda message, share: None)


def shown(row: Row) -> str:
    """A row as text, its targets in brackets: "<user>hi</><assistant>[yo</>]"."""
    text, inside = "", False
    for token, target in zip(row.ids.tolist(), row.targets.tolist(), strict=True):
        if bool(target) != inside:
            text += "]" if inside else "["
            inside = not inside
        text += ToyTokenizer().decode([token])
    return text + ("]" if inside else "")


def all_shown(data: Dataset) -> list[str]:
    """Every training row as text, a pair's branches joined by " / "."""
    return [" / ".join(map(shown, data.train.rows(index))) for index in range(len(data.train))]


def texts(*lengths: int) -> list[dict[str, Any]]:
    """Rows of text of so many tokens, the EOS among them."""
    return [{"text": "t" * (length - 1)} for length in lengths]


def refusal(folder: Path, rows: Sequence[Any], method: str = "sft", **values: Any) -> str:
    """Returns the message with which the data are refused."""
    with pytest.raises(DataError) as caught:
        toy_read(folder, rows, method, **values)
    assert caught.value.exit_code == 2
    return str(caught.value)
