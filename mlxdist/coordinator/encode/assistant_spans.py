"""Which part of a rendered conversation is an assistant's turn, by comparing renders, never by counting their tokens.

A turn starts where the render of what is before it, with a generation prompt, stops being the start of the whole
render, and ends where the render up to it does. Templates that render earlier turns differently (thinking is dropped
from them) break both comparisons; there the turn is found by rendering the conversation with other words in its place.
Shapes: characters of the whole render; tokens come later (sft.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxdist.coordinator.encode.boundaries import common_prefix
from mlxdist.coordinator.encode.messages import Message, Renderer
from mlxdist.coordinator.encode.row_errors import RowError

UNUSUAL = "ЖΩ字ƶɸʬ"


@dataclass(frozen=True, slots=True)
class Turn:
    """The texts whose tokens, where they are the whole row's own, come before a turn's start and before its end."""

    before: str  # "": the turn is the first thing there is
    through: str | None  # None: the turn goes to the end


@dataclass(frozen=True)
class Conversation:
    """A rendered conversation and the way it was rendered."""

    messages: Sequence[Message]
    template: Renderer
    kwargs: Mapping[str, Any]
    text: str

    def part(self, end: int, *, prompt: bool = False) -> str:
        """The render of the first `end` messages, "" where the template refuses them."""
        try:
            return self.template.render(self.messages[:end], add_generation_prompt=prompt, **self.kwargs)
        except RowError:
            return ""

    def reworded(self, place: int, end: int) -> str:
        """The render of the first `end` messages with other words for message `place`."""
        message = self.messages[place]
        # a character that the content does not have, so that nothing the two renders share is the content's
        word = next((letter for letter in UNUSUAL if letter not in message["content"]), UNUSUAL[0])
        changed = [*self.messages[:place], {**message, "content": word}, *self.messages[place + 1 : end]]
        return self.template.render(changed, add_generation_prompt=False, **self.kwargs)


def rendered(messages: Sequence[Message], template: Renderer, kwargs: Mapping[str, Any]) -> Conversation:
    """The whole conversation. Raises RowError where the template refuses it."""
    return Conversation(messages, template, kwargs, template.render(messages, add_generation_prompt=False, **kwargs))


def turn(whole: Conversation, place: int) -> Turn:
    """The turn of message `place` in the whole render. Raises RowError where the template does not show it."""
    last = place == len(whole.messages) - 1
    return Turn(_before(whole, place), None if last else _through(whole, place))


def _before(whole: Conversation, place: int) -> str:
    if place == 0:
        return ""
    prompt = whole.part(place, prompt=True)
    shared = common_prefix(whole.text, prompt)
    if prompt and (shared == len(prompt) or shared >= len(whole.part(place)) > 0):
        return prompt
    return whole.text[: common_prefix(whole.text, whole.reworded(place, len(whole.messages)))]


def _through(whole: Conversation, place: int) -> str:
    closed = whole.part(place + 1)
    if closed and whole.text.startswith(closed):
        return closed
    other = whole.reworded(place, len(whole.messages))
    start = common_prefix(whole.text, other)
    if start == len(whole.text) == len(other):
        raise RowError(f"the chat template leaves out turn {place + 1}, which would be trained")
    after = common_suffix(whole.text[start:], other[start:])
    content_end = len(whole.text) - after
    # what closes the turn where the conversation ends with it: the end token, perhaps a line break
    shut, shut_other = whole.part(place + 1), whole.reworded(place, place + 1)
    closing = shut[len(shut) - common_suffix(shut, shut_other) :]
    return whole.text[: content_end + common_prefix(whole.text[content_end:], closing)]


def common_suffix(left: str, right: str) -> int:
    """How many characters at the end are the same in both."""
    return common_prefix(left[::-1], right[::-1])
