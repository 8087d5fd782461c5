"""The roster of a run: a line for each node, in columns."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

TITLES = ("node", "host", "chip", "memory", "system", "mlxdist", "mlx", "mlx-lm", "bits")


@dataclass(frozen=True)
class RosterLine:
    """One node as it is shown. An empty text is unknown."""

    name: str
    host: str
    chip: str
    memory: str
    system: str
    mlxdist: str
    mlx: str
    mlx_lm: str
    bits: str  # A, B …: nodes with the same letter give the same bits


def roster_lines(nodes: Sequence[RosterLine]) -> list[str]:
    """Returns the table, titles first. A column in which nothing is known is left out."""
    rows = [TITLES, *(astuple(node) for node in nodes)]
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(len(cell) for cell in column) for column in columns]
    lines = zip(*columns, strict=True)
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def bit_classes(canaries: Sequence[tuple[str, ...]]) -> list[str]:
    """Returns the letter of each canary's bit class, A for the first; "-" for a node that disagrees with itself."""
    letters: dict[str, str] = {}
    names = []
    for digests in canaries:
        steady = len(set(digests)) == 1
        names.append(letters.setdefault(digests[0], chr(ord("A") + min(len(letters), 25))) if steady else "-")
    return names
