"""Many texts to ids without doing a part of a text twice, and a long text on every core.

A row gives the tokenizer a text and starts of it: a prompt, a conversation up to each turn. For a row of many megabytes
that repeats the same work, and a text is encoded on one core. So a long text is cut into pieces, each by
the text before it alone: texts with the same start have the same pieces, and each piece is encoded once. A conversation
of many turns gives as many starts of itself: texts that share their start with many are cut into smaller pieces.

A cut is made only where it changes no token: before a space between two letters, where the tokenizer gives the
surroundings the same ids whole and cut. A text without such a place stays whole.
"""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain, islice

from mlxdist.coordinator.encode.tokenizer import Tokenizer

PIECE = 1 << 16  # characters of a piece at least; a shorter text is given as it is
SMALL_PIECE = 1 << 10  # the same, of a text whose start many have
MANY = 16  # texts with the same start
AROUND = 64  # characters on each side of a cut that are looked at
TRIES = 8  # places that are tried before the rest stays whole
_CUT = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])")


def encode_all(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The ids of `texts`, as `tokenizer` gives them. Each distinct piece is given to it once."""
    safe: dict[tuple[str, str], bool] = {}
    starts = Counter(text[:SMALL_PIECE] for text in texts if len(text) > 2 * SMALL_PIECE)
    sizes = (SMALL_PIECE if starts[text[:SMALL_PIECE]] >= MANY else PIECE for text in texts)
    parts = [_pieces(tokenizer, text, size, safe) for text, size in zip(texts, sizes, strict=True)]
    distinct = list(dict.fromkeys(piece for pieces in parts for piece in pieces))
    ids = dict(zip(distinct, tokenizer.encode_batch(distinct), strict=True))
    return [list(chain.from_iterable(map(ids.__getitem__, pieces))) for pieces in parts]


def _pieces(tokenizer: Tokenizer, text: str, size: int, safe: dict[tuple[str, str], bool]) -> list[str]:
    """`text` in pieces of at least `size` characters that can be encoded apart.

    `safe`: the surroundings of cuts that were tried before.
    """
    pieces, start = [], 0
    while len(text) - start > 2 * size:
        places = (found.start() for found in islice(_CUT.finditer(text, start + size), TRIES))
        cut = next((place for place in places if is_safe(tokenizer, text, place, safe)), None)
        if cut is None:
            break
        pieces.append(text[start:cut])
        start = cut
    return [*pieces, text[start:]]


def is_safe(tokenizer: Tokenizer, text: str, place: int, safe: dict[tuple[str, str], bool]) -> bool:
    """Returns True when the surroundings of a place have the same ids whole and cut there; `safe` keeps the answers."""
    around = text[max(place - AROUND, 0) : place], text[place : place + AROUND]
    if around not in safe:
        safe[around] = tokenizer.encode("".join(around)) == tokenizer.encode(around[0]) + tokenizer.encode(around[1])
    return safe[around]
