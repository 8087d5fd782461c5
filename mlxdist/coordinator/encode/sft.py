"""Rows of SFT: messages, prompt and completion, text. One sequence each, its targets marked, cut on the right."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlxdist.coordinator.batch.row_store import pack
from mlxdist.coordinator.encode.assistant_spans import rendered
from mlxdist.coordinator.encode.boundaries import boundary
from mlxdist.coordinator.encode.encoding import Draft, Encoded, Encoding
from mlxdist.coordinator.encode.exchange import exchange_of
from mlxdist.coordinator.encode.many_turns import turns as turns_of
from mlxdist.coordinator.encode.messages import Message, filled_text, is_empty_turn, marks_of, messages_of
from mlxdist.coordinator.encode.remarks import Remark
from mlxdist.coordinator.encode.row_errors import RowError
from mlxdist.coordinator.encode.shown import turn_remarks, unused
from mlxdist.coordinator.encode.starts import Start, starts_of
from mlxdist.coordinator.encode.turn_tokens import TokenSpan, token_span, with_end_token

Marks = Sequence[bool | None]  # per message: trained, not trained, or as data.train_on says

ALL_MASKED = "every assistant turn is marked not to be trained (weight 0 or train false)"


def draft_sft(shape: str, fields: Mapping[str, Any], encoding: Encoding) -> Draft:
    """The texts of one row. Raises RowError."""
    if shape == "text":
        text = filled_text(fields["text"], "text")
        return Draft((text,), lambda ids: [_finished(encoding, encoding.ended(ids[0]), [(0, None)])])
    if shape == "messages":
        messages = messages_of(fields["messages"], "messages")
        return _draft_messages(messages, marks_of(fields["messages"], "messages"), 0, fields, encoding)
    given = exchange_of(fields, ("completion",), encoding)
    prompt, completion = given.prompt, given.responses[0]
    if isinstance(prompt, str) and isinstance(completion, str):
        return _draft_texts(prompt, completion, given.remarks, encoding)
    assert isinstance(prompt, list), "an exchange is all texts or all messages"
    assert isinstance(completion, list), "an exchange is all texts or all messages"
    marks_of(fields["prompt"], "prompt")  # checked, and without effect: a prompt is not trained
    marks = marks_of(fields["completion"], "completion")[-len(completion) :]
    marks = [*[None] * (len(prompt) + len(completion) - len(marks)), *marks]
    return _draft_messages([*prompt, *completion], marks, len(prompt), fields, encoding, given.remarks)


def _draft_texts(prompt: str, completion: str, remarks: tuple[Remark, ...], encoding: Encoding) -> Draft:
    everything = encoding.config.data.train_on == "everything"

    def finish(ids: Sequence[list[int]]) -> list[Encoded]:
        start = 0 if everything else boundary(ids[0], ids[1])
        return [_finished(encoding, encoding.ended(ids[0]), [(start, None)])]

    return Draft((prompt + completion, prompt), finish, remarks)


def _draft_messages(
    messages: list[Message],
    marks: Marks,
    start: int,
    fields: Mapping[str, Any],
    encoding: Encoding,
    remarks: tuple[Remark, ...] = (),
) -> Draft:
    """`start` is the first message that may be trained: 0, or the first of a completion."""
    everything = encoding.config.data.train_on == "everything"
    whole = rendered(messages, encoding.template, encoding.render_kwargs(fields))
    closes = encoding.template.closes(messages)
    places = _masked(messages, marks) if everything else _trained(messages, marks, start, encoding)
    turns = turns_of(whole, places)
    borders = [start for each in turns for start in (Start(each.start, each.more), Start(each.end))]
    starts = starts_of(whole.text, borders, encoding.tokenizer)
    ends_open = messages[-1]["role"] == "assistant" and not closes

    def finish(ids: Sequence[list[int]]) -> list[Encoded]:
        full, found, spans = ids[0], starts.found(ids, encoding.tokenizer), []
        for each in turns:
            before, through = next(found), next(found)
            span = token_span(full, before, None if each.last else through, encoding)
            spans.append(span if closes else with_end_token(full, span, encoding))
        ended = encoding.ended(full) if ends_open else full
        return [_finished(encoding, ended, _outside(spans) if everything else spans)]

    unshown = unused(whole)
    said = [*remarks, *_mark_remarks(messages, marks), *unshown]
    if not everything:
        for place, found in zip(places, turns, strict=True):
            said += turn_remarks(whole, place, found, encoding.template, unshown)
    return Draft(starts.texts, finish, tuple(said))


def _trained(messages: Sequence[Message], marks: Marks, start: int, encoding: Encoding) -> list[int]:
    """The places of the turns to train: those marked so, and of those without a mark the ones of data.train_on."""
    places = [place for place in range(start, len(messages)) if messages[place]["role"] == "assistant"]
    if not places:
        raise RowError('no assistant turn to train on (data.train_on = "everything" trains on every token)')
    unmasked = [place for place in places if marks[place] is not False]
    if not unmasked:
        raise RowError(ALL_MASKED)
    if encoding.config.data.train_on == "last" and not start:
        unmasked = [place for place in unmasked if marks[place] or place == unmasked[-1]]
    for place in unmasked:
        if is_empty_turn(messages[place]):
            raise RowError(f"the assistant turn at message {place + 1} is empty")
    return unmasked


def _masked(messages: Sequence[Message], marks: Marks) -> list[int]:
    """The assistant turns that are marked not to be trained. Raises RowError where that is all of them."""
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    masked = [place for place in places if marks[place] is False]
    if masked and masked == places:
        raise RowError(ALL_MASKED)
    return masked


def _mark_remarks(messages: Sequence[Message], marks: Marks) -> list[Remark]:
    """A remark where a turn that is not the assistant's is marked to be trained, which has no effect."""
    asked = (mark and message["role"] != "assistant" for message, mark in zip(messages, marks, strict=True))
    return [Remark("mark")] if any(asked) else []


def _outside(spans: Sequence[TokenSpan]) -> list[TokenSpan]:
    """The parts of a row between spans in their order."""
    starts: list[int | None] = [0, *(end for _, end in spans)]
    ends: list[int | None] = [*(start for start, _ in spans), None]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if start is not None]


def _finished(encoding: Encoding, ids: list[int], spans: Sequence[tuple[int, int | None]]) -> Encoded:
    """The row with its one BOS, cut; a span's end None is the row's."""
    longest = encoding.config.batch.max_length
    own = encoding.without_bos(ids)
    shift = len(encoding.bos) - own
    ids = [*encoding.bos, *ids[own:]]
    ends = [(max(start + shift, 0), len(ids) if end is None else end + shift) for start, end in spans]
    targets = [max(start, 1) for start, end in ends if max(start, 1) < end]
    if not targets:
        raise RowError("no token of it would be trained")
    if targets[0] >= longest:
        raise RowError(
            f"its first trained token is number {targets[0] + 1} of {len(ids)}, "
            f"beyond batch.max_length = {longest}: nothing of it would be trained",
            len(ids),
        )
    return Encoded((pack(ids, ends)[:longest],), len(ids))
