"""KTO's labels: what people write for a thumb up or down. Never truthiness: the text "false" is not true."""

from mlxdist.coordinator.encode.row_errors import RowError

DESIRABLE = frozenset({"true", "1", "yes", "y", "t", "desirable", "good", "up", "+1", "1.0"})
UNDESIRABLE = frozenset({"false", "0", "no", "n", "f", "undesirable", "bad", "down", "0.0"})


def label_of(value: object) -> bool:
    """True for desirable. Raises RowError for anything but true/false, 1/0 and their usual spellings."""
    if isinstance(value, str):
        word = value.strip().lower()
        if word in DESIRABLE or word in UNDESIRABLE:
            return word in DESIRABLE
    elif isinstance(value, bool | int | float) and value in (0, 1):  # True == 1, nan is in nothing
        return value == 1
    shown = f'"{value}"' if isinstance(value, str) else value
    raise RowError(f"label is {shown}, and must be true or false (or 1/0, yes/no, good/bad)")


def is_label(value: object) -> bool:
    """Returns True if `value` could be a KTO label."""
    try:
        label_of(value)
    except RowError:
        return False
    return True
