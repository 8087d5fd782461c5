"""The named functions: rows to ids exactly as the reference trainer makes them (tests/golden/dataset.json).

They call `encode` as given and add no BOS or EOS; what a run trains on is made around the same rules by `read`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlxdist.coordinator.data.load import Dataset as Dataset  # a run's way in: `dataset.read`
from mlxdist.coordinator.data.load import read as read
from mlxdist.coordinator.encode.boundaries import boundary, cut_left, join_pair
from mlxdist.coordinator.encode.messages import Renderer, last_assistant
from mlxdist.coordinator.encode.tokenizer import Encoder
from mlxdist.protocol.errors import DataError

SftFormat = Literal["messages", "prompt-completion", "text"]


@dataclass(frozen=True, slots=True)
class SftExample:
    """A row of SFT: targets are the ids from `prompt_len` on (but never the first)."""

    ids: list[int]
    prompt_len: int


@dataclass(frozen=True, slots=True)
class DpoExample:
    """A pair of DPO: masks are 0 over the prompt and 1 over the response, as long as the ids."""

    chosen_ids: list[int]
    rejected_ids: list[int]
    chosen_mask: list[int]
    rejected_mask: list[int]


@dataclass(frozen=True, slots=True)
class KtoExample:
    """A row of KTO: the mask is 1 over the completion; `label` True is desirable."""

    ids: list[int]
    mask: list[int]
    label: bool


def sft_row_format(row: Mapping[str, Any]) -> SftFormat:
    """The format of an SFT row by its keys and their types. Raises DataError for none of the three."""
    if isinstance(row.get("messages"), list):
        return "messages"
    if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        return "prompt-completion"
    if isinstance(row.get("text"), str):
        return "text"
    keys = ", ".join(sorted(row)) or "nothing"
    raise DataError(f"a row of messages, of prompt and completion, or of text is needed; this one has {keys}")


def probe_format(row: Mapping[str, Any]) -> str:
    """Returns the format of a row: "preference", an SFT format, or "unknown"."""
    if isinstance(row.get("chosen"), str) and isinstance(row.get("rejected"), str):
        return "preference"
    try:
        return sft_row_format(row)
    except DataError:
        return "unknown"


def encode_sft_row(row: Mapping[str, Any], tok: Encoder, template: Renderer) -> SftExample:
    """One SFT row. Of messages the last assistant turn is trained, of prompt and completion the completion.

    Raises DataError for a row of another format.
    """
    kind = sft_row_format(row)
    if kind == "text":
        return SftExample(tok.encode(row["text"]), 0)
    if kind == "prompt-completion":
        ids = tok.encode(row["prompt"] + row["completion"])
        return SftExample(ids, boundary(ids, tok.encode(row["prompt"])))
    messages = row["messages"]
    ids = tok.encode(template.render(messages, add_generation_prompt=False))
    last = last_assistant(messages)
    if last <= 0:  # no assistant, or nothing before it: nothing to leave out
        return SftExample(ids, 0)
    return SftExample(ids, boundary(ids, tok.encode(template.render(messages[:last], add_generation_prompt=True))))


def tokenize_pair(prompt: str, response: str, tok: Encoder, max_length: int) -> tuple[list[int], int]:
    """The ids of prompt and response and the prompt's length in them, at most `max_length`, cut on the left."""
    ids, prompt_len = join_pair(tok.encode(prompt), tok.encode(prompt + response), lambda: tok.encode(response))
    return cut_left(ids, prompt_len, max_length)


def encode_dpo_row(row: Mapping[str, Any], tok: Encoder, template: Renderer, max_length: int) -> DpoExample:
    """One pair. A prompt of messages is rendered with a generation prompt and thinking off.

    Raises DataError where chosen or rejected is no text, or the prompt neither text nor messages.
    """
    prompt, chosen, rejected = row.get("prompt"), row.get("chosen"), row.get("rejected")
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        raise DataError("chosen and rejected must be text")
    if isinstance(prompt, list):
        prompt = template.render(prompt, add_generation_prompt=True, enable_thinking=False)
    if not isinstance(prompt, str):
        raise DataError("prompt must be text or a list of messages")
    chosen_ids, chosen_from = tokenize_pair(prompt, chosen, tok, max_length)
    rejected_ids, rejected_from = tokenize_pair(prompt, rejected, tok, max_length)
    return DpoExample(chosen_ids, rejected_ids, _mask(chosen_ids, chosen_from), _mask(rejected_ids, rejected_from))


def _mask(ids: Sequence[int], start: int) -> list[int]:
    return [0] * start + [1] * (len(ids) - start)
