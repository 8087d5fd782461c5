"""The turns of a long conversation, in a number of renders that does not grow with their number.

A turn costs two renders or more of all that is before it, so many turns cost the square of their number. Turns that
stand between the same texts are found alike: of each kind the first and the last are found by renders, and if these
agree, the others are put at the same distance from their words. The words' places come from one more render, in which
a character that the conversation does not have stands around the content of every message.
"""

from collections.abc import Sequence

from mlxdist.coordinator.encode.assistant_spans import Conversation, Turn, turn

FEW = 8  # turns; so many are each found by renders
MARKS = "\ue000\uf8f0\U000f0000ƛЉ"  # characters that texts hardly have
UNMARKED = ("system", "developer")  # turns that templates leave out, move or repeat

Place = tuple[int, int]  # the first character of a message's content in the whole render, and the one behind it
Distance = tuple[int, int, str]  # of a turn from its content
Kind = tuple[object, ...]  # what makes the surroundings of two turns the same


def turns(whole: Conversation, places: Sequence[int]) -> list[Turn]:
    """`turn` of each of `places`. Raises RowError."""
    contents = content_places(whole) if len(places) > FEW else {}
    kinds: dict[Kind, list[int]] = {}
    for place in places:
        kinds.setdefault(_kind(whole, contents, place) or (place,), []).append(place)
    found: dict[int, Turn] = {}
    for same in kinds.values():
        found |= {place: turn(whole, place) for place in (same[0], same[-1])}
        distances = {_distance(found[place], contents.get(place)) for place in (same[0], same[-1])}
        distance = distances.pop()
        for place in same[1:-1]:
            found[place] = turn(whole, place) if distances or not distance else _at(whole, contents[place], distance)
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
    """The messages around a turn without their contents, and the texts between; None for a turn of its own kind."""
    if not {place - 1, place, place + 1} <= contents.keys() or whole.messages[place].keys() != {"role", "content"}:
        return None
    (_, before), (start, end), (behind, _) = (contents[number] for number in (place - 1, place, place + 1))
    around = (
        (whole.messages[number]["role"], *sorted(whole.messages[number])) for number in (place - 1, place, place + 1)
    )
    return (*around, whole.text[before:start], whole.text[end:behind])


def _distance(found: Turn, content: Place | None) -> Distance | None:
    """The characters of a turn before and behind its content, and what the text before it has more."""
    if content is None or found.last:
        return None
    return content[0] - found.start, found.end - content[1], found.more


def _at(whole: Conversation, content: Place, distance: Distance) -> Turn:
    before, behind, more = distance
    return Turn(content[0] - before, content[1] + behind, whole.text, more)
