"""Rows of DPO and KTO: a prompt and its responses, joined and cut so that the responses stay."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxdist.coordinator.batch.row_store import TARGET, pack
from mlxdist.coordinator.encode.assistant_spans import rendered, turn
from mlxdist.coordinator.encode.boundaries import boundary, common_prefix, cut_left, join_pair
from mlxdist.coordinator.encode.encoding import Draft, Encoded, Encoding
from mlxdist.coordinator.encode.exchange import Exchange, exchange_of
from mlxdist.coordinator.encode.labels import label_of
from mlxdist.coordinator.encode.many_turns import turns as turns_of
from mlxdist.coordinator.encode.messages import is_empty_turn, marks_of
from mlxdist.coordinator.encode.remarks import Remark
from mlxdist.coordinator.encode.row_errors import RowError
from mlxdist.coordinator.encode.shown import turn_remarks, unused
from mlxdist.protocol.methods import METHODS

Split = tuple[list[int], list[int]]  # the ids of a prompt and of its response, neither cut


def draft_pair(shape: str, fields: Mapping[str, Any], encoding: Encoding) -> Draft:
    """The texts of one row of preferences. Raises RowError."""
    if shape == "prompt, completion, label":
        label = label_of(fields["label"])
        given = exchange_of(fields, ("completion",), encoding)
        one = _response(given, 0, "completion", fields, encoding)
        remarks = (*given.remarks, *one.remarks)
        return Draft(one.texts, lambda ids: [_kto(encoding, one.split(ids, encoding), label)], remarks)
    given = exchange_of(fields, ("chosen", "rejected"), encoding)
    if given.prompt is None:
        return _draft_implicit(given.responses, encoding)
    one, other = (_response(given, place, name, fields, encoding) for place, name in enumerate(("chosen", "rejected")))
    if one.whole == other.whole:
        raise RowError("chosen and rejected are equal")
    many = len(one.texts)
    return Draft(
        (*one.texts, *other.texts),
        lambda ids: _paired(encoding, one.split(ids[:many], encoding), other.split(ids[many:], encoding)),
        (*given.remarks, *one.remarks, *other.remarks),
    )


@dataclass(frozen=True, slots=True)
class _Response:
    """One prompt with one response, as texts."""

    whole: str
    prompt: str
    apart: str | None  # the response, where both are texts that are joined; None: both are one render
    ends_open: bool  # an end token belongs behind it
    remarks: tuple[Remark, ...] = ()

    @property
    def texts(self) -> tuple[str, str]:
        return self.whole, self.prompt

    def split(self, ids: Sequence[list[int]], encoding: Encoding) -> Split:
        """Prompt and response of the ids of `texts`, the response with its EOS. Raises RowError where it has none.

        A render is cut between its own tokens. Texts that merge across the seam are put together as encoded apart.
        """
        if self.apart is None:
            joint, prompt_len = ids[0], boundary(ids[0], ids[1])
        else:
            joint, prompt_len = join_pair(ids[1], ids[0], lambda: encoding.tokenizer.encode(self.apart or ""))
        prompt, response = joint[:prompt_len], joint[prompt_len:]
        if not response:
            raise RowError("a response has no tokens")
        return prompt, encoding.ended(response) if self.ends_open else response


def _response(given: Exchange, place: int, name: str, fields: Mapping[str, Any], encoding: Encoding) -> _Response:
    """The prompt with one of its responses. Thinking is off unless the run or the row says otherwise."""
    kwargs = encoding.render_kwargs(fields, enable_thinking=False)
    prompt, response = given.prompt, given.responses[place]
    _check_marks(fields, name)
    if isinstance(response, str):
        before = prompt
        if not isinstance(before, str):
            before = encoding.template.render(before or [], add_generation_prompt=True, **kwargs)
        return _Response(before + response, before, response, ends_open=True)
    last = response[-1]
    if last["role"] != "assistant":
        raise RowError(f"the last turn of {name} is the {last['role']}'s; a response ends with an assistant turn")
    if is_empty_turn(last):
        raise RowError(f"the last turn of {name} is empty")
    opening = prompt if isinstance(prompt, list) else []
    messages = [*opening, *response]
    whole = rendered(messages, encoding.template, kwargs)
    remarks = unshown = unused(whole)
    first = turn(whole, len(opening))
    others = [at for at in range(len(opening) + 1, len(messages)) if messages[at]["role"] == "assistant"]
    shown = dict(zip(others, turns_of(whole, others), strict=True))  # refuses a turn that the template does not show
    if messages[len(opening)]["role"] == "assistant":
        shown = {len(opening): first, **shown}
    for at, found in shown.items():
        remarks = [*remarks, *turn_remarks(whole, at, found, encoding.template, unshown)]
    return _Response(whole.text, first.before, None, not encoding.template.closes(messages), tuple(remarks))


def _check_marks(fields: Mapping[str, Any], name: str) -> None:
    """Raises RowError for a response with a turn that is marked not to be trained, and for marks that are none."""
    marks_of(fields.get("prompt"), "prompt")
    for place, mark in enumerate(marks_of(fields[name], name)):
        if mark is False and fields[name][place].get("role") == "assistant":
            raise RowError(f"{name}[{place}] is marked not to be trained; dpo and kto train whole responses")


def _draft_implicit(responses: Sequence[object], encoding: Encoding) -> Draft:
    """Two texts: the prompt is the longest common prefix of their tokens."""
    texts = tuple(text for text in responses if isinstance(text, str))

    def finish(ids: Sequence[list[int]]) -> list[Encoded]:
        shared = common_prefix(ids[0], ids[1])
        if shared in (len(ids[0]), len(ids[1])):
            raise RowError("one of chosen and rejected is the start of the other, so no prompt can be told from them")
        splits = [(each[:shared], encoding.ended(each[shared:])) for each in ids]
        return _paired(encoding, splits[0], splits[1])

    return Draft(texts, finish)


def _paired(encoding: Encoding, chosen: Split, rejected: Split) -> list[Encoded]:
    if chosen == rejected:
        raise RowError("chosen and rejected are equal as the model reads them")
    if METHODS[encoding.config.method].labels:  # data.unpair
        return [_kto(encoding, chosen, True), _kto(encoding, rejected, False, side=1)]
    branches, lengths = [], []
    for split in (chosen, rejected):
        prompt, response = _capped(encoding, split)
        lengths.append(len(encoding.bos) + len(prompt) + len(response))
        ids, start = cut_left(prompt + response, len(prompt), encoding.room)
        ids, start = encoding.bos + ids, len(encoding.bos) + start
        branches.append(pack(ids, [(start, len(ids))]))
    if len(METHODS[encoding.config.method].stored) > len(branches):  # the text of the chosen answer, all of it a target
        branches.append(branches[0] | TARGET)
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
