"""A turn's tokens, from its place in the rendered text. Only tokens of the whole render are ever used.

Shapes: T tokens of the whole render; a span is (start, end) in them, end None being the row's.
"""

from collections.abc import Sequence

from mlxdist.coordinator.encode.encoding import Encoding
from mlxdist.coordinator.encode.starts import StartIds

TokenSpan = tuple[int, int | None]


def token_span(full: Sequence[int], before: StartIds, through: StartIds | None, encoding: Encoding) -> TokenSpan:
    """The tokens of a turn: those that hold at least one character of it.

    `before` and `through` are the ids of the texts up to its start and up to its end; `through` None: the turn ends the
    row. A token that merges across the start or the end belongs to the turn. Raises AssertionError for an empty span.
    """
    start = min(before.shared(full), max(len(full) - 1, 0))  # one token stays supervised
    if through is None:
        return start, None
    end = through.shared(full)
    if behind := through.behind(end):  # the last token goes on behind the turn
        left = len(encoding.tokenizer.decode(behind))
        first = end
        while end < len(full) and len(encoding.tokenizer.decode(full[first:end])) < left:
            end += 1
    if start >= end:
        raise AssertionError(f"a turn is trained and has no tokens: it starts at {start} and ends at {end}")
    return start, end


def with_end_token(full: Sequence[int], span: TokenSpan, encoding: Encoding) -> TokenSpan:
    """`span` with the end token behind it: where a template closes no turn, the first token of the next one ends it."""
    start, end = span
    if end is not None and end < len(full) and full[end] in encoding.tokenizer.eos_ids:
        return start, end + 1
    return span
