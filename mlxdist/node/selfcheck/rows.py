"""The rows that the self-check trains on: random tokens, the same on every machine."""

from collections.abc import Sequence

import numpy as np

from mlxdist.protocol.leaves import Leaf, Row


def rows_leaf(lengths: Sequence[int], vocabulary: int, prompt: int = 1) -> Leaf:
    """Returns a leaf of rows of `lengths` tokens. The first `prompt` tokens of each are not trained."""
    random = np.random.Generator(np.random.PCG64(11))
    rows = (random.integers(0, vocabulary, length, dtype=np.int32) for length in lengths)
    return Leaf(0, tuple(_row(index, ids, prompt) for index, ids in enumerate(rows)))


def pairs_leaf(count: int, prompt: int, response: int, vocabulary: int) -> Leaf:
    """Returns a leaf of `count` pairs: two responses of `response` tokens that share a prompt of `prompt` tokens."""
    random = np.random.Generator(np.random.PCG64(12))
    rows = []
    for index in range(count):
        shared = random.integers(0, vocabulary, prompt, dtype=np.int32)
        for first in (0, 1):  # other first tokens, so that the shared part is the prompt and no more
            own = random.integers(0, vocabulary, response, dtype=np.int32)
            own[0] = first
            rows.append(_row(index, np.concatenate([shared, own]), prompt))
    return Leaf(0, tuple(rows), branches=2)


def _row(index: int, ids: np.ndarray[tuple[int], np.dtype[np.int32]], prompt: int) -> Row:
    targets = np.ones(len(ids), np.uint8)
    targets[:prompt] = 0
    return Row(index, ids, targets)
