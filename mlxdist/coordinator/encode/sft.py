"""Rows of SFT: messages, prompt and completion, text. One sequence each, its targets marked, cut on the right."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlxdist.coordinator.batch.row_store import pack
from mlxdist.coordinator.encode.assistant_spans import Turn, rendered, turn
from mlxdist.coordinator.encode.boundaries import boundary, common_prefix
from mlxdist.coordinator.encode.encoding import Draft, Encoded, Encoding, ends_itself
from mlxdist.coordinator.encode.messages import (
    Message,
    as_messages,
    filled_text,
    is_empty_turn,
    last_assistant,
    messages_of,
    text_of,
)
from mlxdist.coordinator.encode.row_errors import RowError


def draft_sft(shape: str, fields: Mapping[str, Any], encoding: Encoding) -> Draft:
    """The texts of one row. Raises RowError."""
    if shape == "text":
        text = filled_text(fields["text"], "text")
        return Draft((text,), lambda ids: [_finished(encoding, encoding.ended(ids[0]), [(0, None)])])
    if shape == "messages":
        messages = messages_of(fields["messages"], "messages")
        return _draft_messages(messages, 0, fields, encoding)
    prompt, completion = fields["prompt"], fields["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return _draft_texts(text_of(prompt, "prompt"), filled_text(completion, "completion"), encoding)
    before = as_messages(prompt, "prompt", "user")
    after = as_messages(completion, "completion", "assistant")
    return _draft_messages([*before, *after], len(before), fields, encoding)


def _draft_texts(prompt: str, completion: str, encoding: Encoding) -> Draft:
    everything = encoding.config.data.train_on == "everything"

    def finish(ids: Sequence[list[int]]) -> list[Encoded]:
        start = 0 if everything else boundary(ids[0], ids[1])
        return [_finished(encoding, encoding.ended(ids[0]), [(start, None)])]

    return Draft((prompt + completion, prompt), finish)


def _draft_messages(messages: list[Message], start: int, fields: Mapping[str, Any], encoding: Encoding) -> Draft:
    """`start` is the first message that may be trained: 0, or the first of a completion."""
    train_on = encoding.config.data.train_on
    whole = rendered(messages, encoding.template, encoding.render_kwargs(fields))
    closed = ends_itself(whole.text, messages[-1]["content"])
    if train_on == "everything":
        turns = [Turn("", None)]
    else:
        turns = [turn(whole, place) for place in _trained(messages, start, train_on)]
    texts = [text for each in turns for text in (each.before, each.through or "")]

    def finish(ids: Sequence[list[int]]) -> list[Encoded]:
        full, spans = ids[0], []
        for place, each in enumerate(turns):
            before, through = ids[1 + 2 * place], ids[2 + 2 * place]
            spans.append((boundary(full, before), None if each.through is None else common_prefix(full, through)))
        return [_finished(encoding, full if closed else encoding.ended(full), spans)]

    return Draft((whole.text, *texts), finish)


def _trained(messages: Sequence[Message], start: int, train_on: str) -> list[int]:
    places = [place for place in range(start, len(messages)) if messages[place]["role"] == "assistant"]
    if not places:
        raise RowError('no assistant turn to train on (data.train_on = "everything" trains on every token)')
    if train_on == "last" and not start:
        places = [last_assistant(messages)]
    for place in places:
        if is_empty_turn(messages[place]):
            raise RowError(f"the assistant turn at message {place + 1} is empty")
    return places


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
