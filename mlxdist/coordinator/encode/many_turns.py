"""The turns of a long conversation, in a number of renders that does not grow with their number.

A turn costs two renders or more of all that is before it, so many turns cost the square of their number. Turns that
stand between the same texts are found alike: of each kind the first and the last are found by renders, and if these
agree, the others are put at the same distance from the contents of the messages around them, where the same texts are
between. The contents' places come from one more render, in which a character that the conversation does not have stands
around each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mlxdist.coordinator.encode.assistant_spans import Conversation, Turn, turn
from mlxdist.coordinator.encode.messages import Message

FEW = 8  # turns; so many are each found by renders
MARKS = "\ue000\uf8f0\U000f0000ƛЉ"  # characters that texts hardly have
UNMARKED = ("system", "developer")  # turns that templates leave out, move or repeat

Place = tuple[int, int]  # the first character of a message's content in the whole render, and the one behind it
Kind = tuple[object, ...]  # what makes the surroundings of two turns the same


@dataclass(frozen=True, slots=True)
class Around:
    """The texts between a turn and the contents before and behind it, and what the text before it has more."""

    before: str
    behind: str
    more: str


def turns(whole: Conversation, places: Sequence[int]) -> list[Turn]:
    """`turn` of each of `places`. Raises RowError."""
    contents = content_places(whole) if len(places) > FEW else {}
    kinds: dict[Kind, list[int]] = {}
    for place in places:
        kinds.setdefault(_kind(whole, contents, place) or (place,), []).append(place)
    found: dict[int, Turn] = {}
    for same in kinds.values():
        found |= {place: turn(whole, place) for place in (same[0], same[-1])}
        around = {_around(whole, contents, found[place], place) for place in (same[0], same[-1])}
        alike = around.pop() if len(around) == 1 else None
        for place in same[1:-1]:
            found[place] = (alike and _between(whole, contents, place, alike)) or turn(whole, place)
    return [found[place] for place in places]


def content_places(whole: Conversation) -> dict[int, Place]:
    """The content of each message in the whole render, by the message's number.

    Empty where the template does not show every content as it is: where marks change it or get lost.
    """
    mark = next((each for each in MARKS if each not in whole.text), "")
    marked = [
        number
        for number, message in enumerate(whole.messages)
        if message["role"] not in UNMARKED and message["content"].strip()
    ]
    messages = [dict(message) for message in whole.messages]
    for number in marked:
        content = messages[number]["content"]
        words = content.strip()
        messages[number]["content"] = content.replace(words, f"{mark}{words}{mark}", 1)
    parts = (whole.render(messages) or "").split(mark) if mark else []
    if len(parts) != 2 * len(marked) + 1 or "".join(parts) != whole.text:
        return {}
    found, end = {}, 0
    for number, between, words in zip(marked, parts[::2], parts[1::2], strict=False):
        start = end + len(between)
        end = start + len(words)
        if words == whole.messages[number]["content"].strip():
            found[number] = (start, end)
    return found


def _kind(whole: Conversation, contents: dict[int, Place], place: int) -> Kind | None:
    """The messages around a turn without their words; None for a turn of its own kind.

    Where a turn has a content and no more, the texts around it are a part of its kind: they show what a template does
    to some turns and not to others.
    """
    if not {place - 1, place + 1} <= contents.keys():
        return None
    around = tuple(
        (whole.messages[number]["role"], *sorted(whole.messages[number])) for number in (place - 1, place, place + 1)
    )
    if place not in contents or whole.messages[place].keys() != {"role", "content"}:
        return around
    (_, before), (start, end), (behind, _) = (contents[number] for number in (place - 1, place, place + 1))
    return (*around, whole.text[before:start], whole.text[end:behind])


def _around(whole: Conversation, contents: dict[int, Place], found: Turn, place: int) -> Around | None:
    """The surroundings of a turn that was found; None where it has none, or goes into the messages around it."""
    if not {place - 1, place + 1} <= contents.keys():
        return None
    before, behind = contents[place - 1][1], contents[place + 1][0]
    if not before <= found.start <= found.end <= behind:
        return None
    return Around(whole.text[before : found.start], whole.text[found.end : behind], found.more)


def _between(whole: Conversation, contents: dict[int, Place], place: int, around: Around) -> Turn | None:
    """The turn that has these surroundings; None where other texts are there, or its words are not in it."""
    start, end = contents[place - 1][1] + len(around.before), contents[place + 1][0] - len(around.behind)
    text = whole.text
    if start > end or not text.startswith(around.before, start - len(around.before)):
        return None
    if not text.startswith(around.behind, end) or not _shown(whole.messages[place], text[start:end]):
        return None
    return Turn(start, end, text, around.more)


def _shown(message: Message, text: str) -> bool:
    """Returns True when a text has a message's content, or of one without content the tools that it calls."""
    content, calls = message["content"].strip(), message.get("tool_calls") or ()
    if content:
        return content in text
    return bool(calls) and all(call["function"]["name"] in text for call in calls)
