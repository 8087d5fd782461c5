"""The boundary of a prompt and its response, in tokens. Ids in, ids and boundaries out; no text, no tokenizer.

Shapes: T tokens of a row. A boundary is the number of tokens before the response.
"""

from collections.abc import Callable, Sequence


def common_prefix(left: Sequence[object], right: Sequence[object]) -> int:
    """Returns the number of items from the first on that are the same in both: ids, messages or characters."""
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:  # the usual case: one is the start of the other
        return shorter
    same = 0
    while left[same] == right[same]:
        same += 1
    return same


def boundary(ids: Sequence[int], prompt_ids: Sequence[int]) -> int:
    """The longest common prefix of a row and its prompt, short of the row's end: one token stays supervised."""
    return min(common_prefix(ids, prompt_ids), max(len(ids) - 1, 0))


def join_pair(
    prompt_ids: list[int], joint_ids: list[int], response_ids: Callable[[], list[int]]
) -> tuple[list[int], int]:
    """The ids of prompt and response, and the prompt's length in them.

    `joint_ids` are those of the joined text. Where the tokenizer merges across the seam, so that the prompt's are not
    its start, the two are put together as encoded apart; only then `response_ids` is called.
    """
    if common_prefix(joint_ids, prompt_ids) == len(prompt_ids):
        return joint_ids, len(prompt_ids)
    return prompt_ids + response_ids(), len(prompt_ids)


def cut_left(ids: list[int], prompt_len: int, max_length: int) -> tuple[list[int], int]:
    """The last `max_length` ids, so that the response stays, and what is left of the prompt's length."""
    excess = max(len(ids) - max_length, 0)
    return ids[excess:], max(prompt_len - excess, 0)
