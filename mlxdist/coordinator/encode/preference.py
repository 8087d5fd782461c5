"""Rows of DPO and KTO: a prompt and its responses, joined and cut so that the responses stay."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxdist.coordinator.batch.row_store import pack
from mlxdist.coordinator.encode.assistant_spans import rendered, turn
from mlxdist.coordinator.encode.boundaries import common_prefix, cut_left, join_pair
from mlxdist.coordinator.encode.encoding import Draft, Encoded, Encoding, ends_itself
from mlxdist.coordinator.encode.labels import label_of
from mlxdist.coordinator.encode.messages import (
    TEXT_OR_MESSAGES,
    Message,
    as_messages,
    filled_text,
    is_empty_turn,
    messages_of,
    text_of,
)
from mlxdist.coordinator.encode.row_errors import RowError
from mlxdist.protocol.methods import METHODS

Split = tuple[list[int], list[int]]  # the ids of a prompt and of its response, neither cut


def draft_pair(shape: str, fields: Mapping[str, Any], encoding: Encoding) -> Draft:
    """The texts of one row of preferences. Raises RowError."""
    if shape == "prompt, completion, label":
        label = label_of(fields["label"])
        response = _response(fields["prompt"], fields["completion"], "completion", fields, encoding)
        return Draft(response.texts, lambda ids: [_kto(encoding, response.split(ids, encoding), label)])
    chosen, rejected, prompt = fields["chosen"], fields["rejected"], fields.get("prompt")
    if isinstance(chosen, list) and isinstance(rejected, list) and not isinstance(prompt, list):
        prompt, chosen, rejected = _told_apart(prompt, chosen, rejected)
    if prompt is None:
        return _draft_implicit(chosen, rejected, encoding)
    one = _response(prompt, chosen, "chosen", fields, encoding)
    other = _response(prompt, rejected, "rejected", fields, encoding)
    many = len(one.texts)
    return Draft(
        (*one.texts, *other.texts),
        lambda ids: _paired(encoding, one.split(ids[:many], encoding), other.split(ids[many:], encoding)),
    )


@dataclass(frozen=True, slots=True)
class _Response:
    """One prompt with one response, as texts."""

    joint: str
    prompt: str
    response: str
    closed: bool  # whether the response ends itself, as a chat render does

    @property
    def texts(self) -> tuple[str, str]:
        return self.joint, self.prompt

    def split(self, ids: Sequence[list[int]], encoding: Encoding) -> Split:
        """Prompt and response of the ids of `texts`, the response with its EOS. Raises RowError where it has none."""
        joint, prompt_len = join_pair(ids[1], ids[0], lambda: encoding.tokenizer.encode(self.response))
        prompt, response = joint[:prompt_len], joint[prompt_len:]
        if not response:
            raise RowError("a response has no tokens")
        return prompt, response if self.closed else encoding.ended(response)


def _response(prompt: object, response: object, field: str, fields: Mapping[str, Any], encoding: Encoding) -> _Response:
    """`prompt` and `response`: a text or messages each. Thinking is off unless the run or the row says otherwise."""
    kwargs = encoding.render_kwargs(fields, enable_thinking=False)
    if isinstance(response, str):
        words = filled_text(response, field)
        if isinstance(prompt, str):
            before = text_of(prompt, "prompt")
        else:
            before = encoding.template.render(
                messages_of(prompt, "prompt", TEXT_OR_MESSAGES), add_generation_prompt=True, **kwargs
            )
        return _Response(before + words, before, words, closed=False)
    opening: list[Message] = [] if prompt == [] else as_messages(prompt, "prompt", "user")
    turns = messages_of(response, field, TEXT_OR_MESSAGES)
    if is_empty_turn(turns[-1]):
        raise RowError(f"the last turn of {field} is empty")
    whole = rendered([*opening, *turns], encoding.template, kwargs)
    before = turn(whole, len(opening)).before
    before = before[: common_prefix(before, whole.text)]
    closed = ends_itself(whole.text, turns[-1]["content"])
    return _Response(whole.text, before, whole.text[len(before) :], closed)


def _told_apart(prompt: object, chosen: list[Any], rejected: list[Any]) -> tuple[object, list[Any], list[Any]]:
    """The prompt of two conversations: what they share in whole messages, else the prompt's own text as a user turn."""
    shared = common_prefix(chosen, rejected)
    if shared in (len(chosen), len(rejected)):
        raise RowError("chosen and rejected do not part in any message, so no prompt can be told from them")
    if shared == 0 and prompt is not None:
        return prompt, chosen, rejected
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _draft_implicit(chosen: object, rejected: object, encoding: Encoding) -> Draft:
    """Two texts: the prompt is the longest common prefix of their tokens."""
    texts = (filled_text(chosen, "chosen"), filled_text(rejected, "rejected"))

    def finish(ids: Sequence[list[int]]) -> list[Encoded]:
        shared = common_prefix(ids[0], ids[1])
        if shared in (len(ids[0]), len(ids[1])):
            raise RowError("one of chosen and rejected is the start of the other, so no prompt can be told from them")
        splits = [(each[:shared], encoding.ended(each[shared:])) for each in ids]
        return _paired(encoding, splits[0], splits[1])

    return Draft(texts, finish)


def _paired(encoding: Encoding, chosen: Split, rejected: Split) -> list[Encoded]:
    if METHODS[encoding.config.method].labels:  # data.unpair
        return [_kto(encoding, chosen, True), _kto(encoding, rejected, False, side=1)]
    branches, lengths = [], []
    for split in (chosen, rejected):
        prompt, response = _capped(encoding, split)
        lengths.append(len(encoding.bos) + len(prompt) + len(response))
        ids, start = cut_left(prompt + response, len(prompt), encoding.room)
        ids, start = encoding.bos + ids, len(encoding.bos) + start
        branches.append(pack(ids, [(start, len(ids))]))
    return [Encoded(tuple(branches), max(lengths))]


def _kto(encoding: Encoding, split: Split, label: bool, side: int = 0) -> Encoded:
    prompt, response = _capped(encoding, split)
    length = len(encoding.bos) + len(prompt) + len(response)
    response = _keeping_end(encoding, response, encoding.room)
    # of the prompt, what a completion of one token would leave room for
    kept = np.array(prompt[-encoding.room :], dtype=np.uint32)
    return Encoded((kept, pack(response, [(0, len(response))])), length, label, side)


def _capped(encoding: Encoding, split: Split) -> Split:
    """Prompt within `max_prompt_length` (its end stays), response within `max_completion_length` (start and EOS)."""
    prompt, response = split
    prompt = prompt[encoding.without_bos(prompt) :]
    data = encoding.config.data
    if data.max_prompt_length:
        prompt = prompt[-data.max_prompt_length :]
    if data.max_completion_length:
        response = _keeping_end(encoding, response, data.max_completion_length)
    return prompt, response


def _keeping_end(encoding: Encoding, response: list[int], longest: int) -> list[int]:
    """The first tokens of a response, at most `longest`, its closing tokens in the last places."""
    if len(response) <= longest:
        return response
    tail = range(max(len(response) - 3, 0), len(response))
    end = next((place for place in tail if response[place] in encoding.tokenizer.eos_ids), len(response))
    closing = response[end:]
    return response[: max(longest - len(closing), 0)] + closing[max(len(closing) - longest, 0) :]
