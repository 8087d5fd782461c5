"""The part of a rendered conversation that is an assistant's turn, found by comparing renders.

A turn starts where the render of what is before it, with a generation prompt, stops being the start of the whole
render, and ends where the render up to it does. A template that shows earlier turns otherwise than the last one (it
removes their reasoning, it inserts an empty thought) breaks both comparisons. There the conversation is rendered again
with other words in the turn: in its content, its reasoning and its calls. What differs between the two is the turn.
Shapes: characters of the whole render; tokens come later (turn_tokens.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxdist.coordinator.encode.boundaries import common_prefix
from mlxdist.coordinator.encode.messages import REASONING, Message, Renderer
from mlxdist.coordinator.encode.row_errors import RowError

# Stand-ins for a turn's words: first characters that texts hardly have, then ASCII for templates that escape others.
STAND_INS = "ЖΩ字ƶɸʬQZXJ"


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn's place in the whole render."""

    start: int
    end: int
    text: str  # the whole render
    more: str = ""  # what a generation prompt has behind `start` and the render has not, such as an opened thought
    last: bool = False  # the turn goes to the end

    @property
    def before(self) -> str:
        """The text whose tokens come before its start; "": the turn is the first thing there is."""
        return self.text[: self.start] + self.more

    @property
    def through(self) -> str | None:
        """The text whose tokens come before its end; None: the turn goes to the end."""
        return None if self.last else self.text[: self.end]


@dataclass(frozen=True)
class Conversation:
    """A rendered conversation and the way it was rendered."""

    messages: Sequence[Message]
    template: Renderer
    kwargs: Mapping[str, Any]
    text: str

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str | None:
        """Other messages rendered in the same way, None where the template refuses them."""
        try:
            return self.template.render(messages, add_generation_prompt=prompt, **self.kwargs)
        except RowError:
            return None

    def part(self, end: int, *, prompt: bool = False) -> str:
        """The render of the first `end` messages, "" where the template refuses them."""
        return self.render(self.messages[:end], prompt=prompt) or ""

    def with_turn(self, place: int, message: Message, end: int | None = None) -> str | None:
        """The render of the first `end` messages, `message` at `place`; None where the template refuses them."""
        return self.render([*self.messages[:place], message, *self.messages[place + 1 :][: self._more(place, end)]])

    def _more(self, place: int, end: int | None) -> int:
        return (len(self.messages) if end is None else end) - place - 1


@dataclass(frozen=True, slots=True)
class Reworded:
    """A conversation with other words in one turn."""

    message: Message
    word: str
    text: str  # the whole render with it


def rendered(messages: Sequence[Message], template: Renderer, kwargs: Mapping[str, Any]) -> Conversation:
    """The whole conversation. Raises RowError where the template refuses it."""
    return Conversation(messages, template, kwargs, template.render(messages, add_generation_prompt=False, **kwargs))


def turn(whole: Conversation, place: int) -> Turn:
    """The turn of message `place` in the whole render. Raises RowError where the template shows nothing of it."""
    start, more = _start(whole, place)
    last = place == len(whole.messages) - 1
    end = len(whole.text) if last else _end(whole, place, start)
    _check_shown(whole, place, whole.text[start:end])
    return Turn(start, end, whole.text, more, last)


def own_words(whole: Conversation, place: int) -> int:
    """The first character of a turn's own words: up to it the render is the same with other words in the turn."""
    other = next(_rewordings(whole, place), None)
    return len(whole.text) if other is None else common_prefix(whole.text, other.text)


def _start(whole: Conversation, place: int) -> tuple[int, str]:
    """A turn's first character, and what the generation prompt has behind it that the whole render has not."""
    if place == 0:
        return _first_start(whole), ""
    prompt = whole.part(place, prompt=True)
    if prompt and whole.text.startswith(prompt):
        return len(prompt), ""
    shared, closed = common_prefix(whole.text, prompt), len(whole.part(place))
    if prompt and shared >= closed > 0:
        start = max(_before_tag(whole.text[: min(shared, own_words(whole, place))]), closed)
        return start, prompt[shared:] if start == shared else ""
    return _after_header(whole, place, prompt), ""


def _before_tag(text: str) -> int:
    """The length of `text` without a tag begun at its end: "<think>" and "<tool_call>" share characters, no token."""
    opened = text.rfind("<")
    return opened if opened > text.rfind(">") else len(text)


def _after_header(whole: Conversation, place: int, prompt: str) -> int:
    """The end of the turn's header, such as <|im_start|>assistant, where the turns before it are shown otherwise.

    A generation prompt is that header, perhaps with an opened thought. It is looked for between the message before and
    the turn's own words, where the turn starts if it is not there.
    """
    before, nearest = whole.part(place), _behind_words(whole, place - 1, 0)
    own = own_words(whole, place)
    if nearest is None or not before or not prompt.startswith(before):
        return own
    header = prompt[len(before) :]
    if not header:  # the template writes no header
        return nearest
    return _behind(whole.text, header, nearest, own) or own


def _first_start(whole: Conversation) -> int:
    """The start of a turn that opens the conversation: 0, but behind its header where a template writes a text first.

    Such a text is a system turn of the template's own. The header is what a generation prompt has behind the turn.
    """
    closed, prompt = whole.part(1), whole.part(1, prompt=True)
    header = prompt[common_prefix(closed, prompt) :] if closed else ""
    start = _behind(whole.text, header, 0, own_words(whole, 0)) or 0
    first = whole.text[: max(start - len(header), 0)].rpartition("<")[0]  # a single tag, such as a BOS, is no text
    return start if first.strip() else 0


def _behind(text: str, header: str, start: int, end: int) -> int | None:
    """The end of the last `header` in a part of `text`, or of what is left of it without its last tags."""
    while header:
        at = text.rfind(header, start, end)
        if at >= 0:
            return at + len(header)
        header = header[: max(header.rfind("<"), 0)]
    return None


def _end(whole: Conversation, place: int, start: int) -> int:
    closed = whole.part(place + 1)
    if len(closed) > start and whole.text.startswith(closed):
        return len(closed)
    shared, before = common_prefix(closed, whole.part(place, prompt=True)), whole.part(place)
    alone = closed[shared:] if before and closed.startswith(before) and shared >= len(before) else ""
    if alone.strip() and whole.text.startswith(alone, start):
        return start + len(alone)
    end = _behind_words(whole, place, start)
    if end is None and next(_rewordings(whole, place), None) is None:
        raise RowError(_left_out(place))
    if end is None:
        raise RowError(f"the end of turn {place + 1} cannot be told from the chat template's renders")
    return end


def _behind_words(whole: Conversation, place: int, start: int) -> int | None:
    """The end of a message with what closes it, found by other words in it; None where that changes what follows.

    Words that change what follows, such as a call that a tool's answer repeats, say nothing of the end.
    """
    loose = None
    for other in _rewordings(whole, place):
        behind = other.text.rpartition(other.word)[2]
        shut = whole.with_turn(place, other.message, place + 1) or ""
        closing = shut.rpartition(other.word)[2] if other.word in shut else ""
        closed = _shared_closing(behind, closing)
        rest = len(behind) - closed  # what follows the turn
        if common_suffix(whole.text[start:], other.text[start:]) < rest:
            continue
        if closed or not closing.strip():
            return len(whole.text) - rest
        # nothing closes the turn as it did at the end: the last word may be a repetition behind the turn
        loose = len(whole.text) - rest if loose is None else loose
    return loose


def _shared_closing(behind: str, closing: str) -> int:
    """The characters of `behind` that close a turn, where `closing` does so at the end of a conversation.

    The last tag that both begin with may be the next turn's header; it closes the turn where no other tag does.
    """
    shared = common_prefix(behind, closing)
    whole_tags = _before_tag(behind[:shared])
    return whole_tags if behind[:whole_tags].strip() else shared


def _rewordings(whole: Conversation, place: int) -> Iterator[Reworded]:
    """The conversation with other words in one turn, in several ways, as far as the template shows them."""
    for word in STAND_INS:
        if word in whole.text:
            continue
        shown = False
        for message in _variants(whole.messages[place], word):
            text = whole.with_turn(place, message)
            if text is not None and word in text:
                shown = True
                yield Reworded(message, word, text)
        if shown:
            return


def _variants(message: Message, word: str) -> Iterator[Message]:
    reworded = {**message, "content": word, **{key: word for key in REASONING if message.get(key)}}
    calls = message.get("tool_calls")
    if calls:  # their names stay: a template may write them elsewhere, too
        functions = [{**call["function"], "arguments": {word: word}} for call in calls]
        changed = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
        yield {**reworded, "tool_calls": changed}
    yield reworded
    if calls:  # a template may refuse words in more than one field, and show none but the call's
        yield {**message, "tool_calls": changed}
    plain = {"role": message["role"], "content": word}
    if plain != reworded:
        yield plain


def _check_shown(whole: Conversation, place: int, text: str) -> None:
    """Raises RowError where the render has no words of a turn, AssertionError where it has and none was found."""
    message = whole.messages[place]
    content = message["content"].strip()
    if content and content in text:
        return
    shown, bare = whole.text, {"role": message["role"], "content": "" if content else message["content"]}
    if whole.with_turn(place, bare) == shown:
        fields = [key for key in (*REASONING, "tool_calls") if message.get(key)]
        raise RowError(_left_out(place, [*fields, "content"] if content else fields))
    if not text.strip():
        without = whole.render([*whole.messages[:place], *whole.messages[place + 1 :]])
        if without == shown or not any(True for _ in _rewordings(whole, place)):
            raise RowError(_left_out(place))
        raise AssertionError(f"turn {place + 1} is shown by the chat template, and no character of it was found")


def _left_out(place: int, fields: Sequence[str] = ()) -> str:
    said = f"the chat template leaves out turn {place + 1}, which would be trained"
    return f"{said}: it does not show {' and '.join(fields)}" if fields else said


def common_suffix(left: str, right: str) -> int:
    """Returns the number of characters at the end that are the same in both."""
    return common_prefix(left[::-1], right[::-1])
