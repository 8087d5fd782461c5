"""The ids of many starts of one text, such as a conversation up to each turn, for little more than the text's own work.

The text is cut at its starts where that changes no token, and each part is encoded once. A start that ends at a cut has
the ids of the whole up to there. Any other one has those up to the last cut that serves it, and ids of the rest.
Shapes: characters of the text; T tokens of it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

from mlxdist.coordinator.encode.boundaries import common_prefix
from mlxdist.coordinator.encode.long_texts import AROUND, TRIES, is_safe
from mlxdist.coordinator.encode.tokenizer import Encoder, Tokenizer

FEW = 16  # starts; so many are each encoded from the text's first character


@dataclass(frozen=True, slots=True)
class Start:
    """The characters of a text up to `end`, with `more` behind them."""

    end: int
    more: str = ""


@dataclass(frozen=True, slots=True)
class StartIds:
    """The ids of a start: the first `known` of the whole text, then `rest`."""

    known: int
    rest: Sequence[int]

    def shared(self, full: Sequence[int]) -> int:
        """Returns the longest common prefix with the ids `full` [T] of the whole text."""
        return self.known + common_prefix(full[self.known : self.known + len(self.rest)], self.rest)

    def behind(self, place: int) -> Sequence[int]:
        """Returns its ids from a place on that is not among the known ones."""
        return self.rest[place - self.known :]


@dataclass(frozen=True, slots=True)
class Starts:
    """A text and its starts, each from a cut on; `cuts` are places in the text, from 0."""

    text: str
    cuts: Sequence[int]
    starts: Sequence[tuple[int, Start]]  # a place among the cuts, and the start

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts to encode: the whole, its parts where it is cut, and each start from its cut on."""
        return self.text, *self._parts, *(self._rest(place, start) for place, start in self.starts)

    def found(self, ids: Sequence[list[int]], tokenizer: Encoder) -> Iterator[StartIds]:
        """Yields the ids of each start, from the ids of `texts`."""
        count = len(self._parts)
        full, parts, rests = ids[0], ids[1 : 1 + count], ids[1 + count :]
        if parts and list(chain.from_iterable(parts)) != full:  # a cut changed a token after all
            for _, start in self.starts:
                yield StartIds(0, tokenizer.encode(self.text[: start.end] + start.more))
            return
        known = list(accumulate(map(len, parts), initial=0))
        for (place, _), rest in zip(self.starts, rests, strict=True):
            yield StartIds(known[place], rest)

    @property
    def _parts(self) -> list[str]:
        if len(self.cuts) == 1:
            return []
        return [self.text[start:end] for start, end in pairwise([*self.cuts, len(self.text)])]

    def _rest(self, place: int, start: Start) -> str:
        return self.text[self.cuts[place] : start.end] + start.more


def starts_of(text: str, starts: Sequence[Start], tokenizer: Tokenizer) -> Starts:
    """Returns a text with its starts, cut where they end if there are many."""
    if len(starts) <= FEW:
        return Starts(text, [0], [(0, start) for start in starts])
    safe: dict[tuple[str, str], bool] = {}
    ends = sorted({start.end for start in starts if _may_cut(text, start.end)})
    cuts = [0, *(end for end in ends if is_safe(tokenizer, text, end, safe))]
    return Starts(text, cuts, [(_cut_of(text, start, cuts, tokenizer, safe), start) for start in starts])


def _may_cut(text: str, place: int) -> bool:
    """Returns True inside of the text, where two characters meet of which a long run does not decide the tokens."""
    if not 0 < place < len(text):
        return False
    before, behind = text[place - 1], text[place]
    return not (before.isspace() and behind.isspace()) and not (before.isalnum() and behind.isalnum())


def _cut_of(
    text: str, start: Start, cuts: Sequence[int], tokenizer: Tokenizer, safe: dict[tuple[str, str], bool]
) -> int:
    """Returns the place among the cuts from which a start is encoded."""
    if not start.more:
        place = bisect_right(cuts, start.end) - 1
        if cuts[place] == start.end:
            return place
    last = bisect_left(cuts, start.end) - 1
    for place in range(last, max(last - TRIES, 0), -1):
        begin = max(cuts[place] - AROUND, 0)
        if is_safe(tokenizer, text[begin : start.end] + start.more, cuts[place] - begin, safe):
            return place
    return 0
