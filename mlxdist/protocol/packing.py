"""The modes in which the rows of a leaf are computed. All nodes of a run use the same one: others give other bits."""

PACKED = "packed"  # one row for the whole leaf
BY_PIECE = "by piece"  # the same, with the modules that mix positions in their own way called for each row
APART = "apart"  # each row alone: the model cannot be packed
MODES = (PACKED, BY_PIECE, APART)  # the fastest first; each one computes what those before it do


def weaker(left: str, right: str) -> str:
    """Returns the mode that a model must use which allows one of them and is asked for the other.

    Raises ValueError for another word.
    """
    return MODES[max(MODES.index(left), MODES.index(right))]
