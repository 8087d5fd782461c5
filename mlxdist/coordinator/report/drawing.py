"""The picture of a run as one calm screen, drawn for any width: what does not fit is left out, the least of it first.

my-rows ━━━━━━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ step 45 of 100
working on step 46 (1.2 s), about 2 min 12 s left
loss         1.2345  █▇▆▅▅▄▃▃▂▂▁▁                      812 tokens/s, 2.4 s a step
validation   1.3456  █▄▂▁                              best 1.3001 at step 40
node      state    share  tokens/s   memory     swap  heat
mini-1    busy      41 %       410   5.2 GB   0.0 GB  nominal
mini-2    suspect  no heartbeat for 6 s
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mlxdist.coordinator.report.format import duration_phrase, left_phrase, rate_phrase
from mlxdist.coordinator.report.node_states import WORKING
from mlxdist.coordinator.report.picture import NodeRow, Picture
from mlxdist.coordinator.report.sparkline import sparkline

STYLES = MappingProxyType(
    {"ready": "green", "busy": "green", "suspect": "yellow", "dead": "red", "left": "red", "refused": "red"}
)
LEAST_CURVE, MOST_CURVE = 8, 60  # signs of a curve
COLUMNS: Mapping[str, tuple[int, Callable[[NodeRow], str]]] = MappingProxyType(  # the first ones stay the longest
    {
        "share": (5, lambda node: "" if node.share is None else f"{100 * node.share:.0f} %"),
        "tokens/s": (8, lambda node: rate_phrase(node.tokens_per_second)[:-9] if node.tokens_per_second else ""),
        "memory": (7, lambda node: _size(node.peak_gb) if node.peak_gb else ""),
        "swap": (7, lambda node: "" if node.swap_gb is None else _size(node.swap_gb)),
        "heat": (8, lambda node: node.heat),
    }
)


def draw(
    picture: Picture, title: str, now: float, *, width: int, height: int, ascii_only: bool = False
) -> RenderableType:
    """Returns the screen, at most `height` lines of `width` columns. `now`: in seconds of the run."""
    lines: list[RenderableType] = [_bar(picture, title, width), _line(_busy(picture, now))]
    lines += [_line(line) for line in _curves(picture, width, ascii_only)]
    lines += [_line(line) for line in _nodes(picture.nodes, width, max(height - len(lines), 1))]
    return Group(*lines[:height])


def _bar(picture: Picture, title: str, width: int) -> RenderableType:
    where, last, progress = "", picture.last, picture.progress
    if last is not None:
        total = picture.total_steps
        where = f"step {last['step']}" + (f" of {total}" if total else "")
    elif progress is not None:
        where = f"{progress:.0%}"
    name = Text(title, "bold", no_wrap=True, overflow="ellipsis")
    grid = Table.grid(padding=(0, 1, 0, 0), expand=True)
    grid.add_column(max_width=max(width // 4, 8), no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(justify="right", no_wrap=True)
    known = progress is not None
    bar = ProgressBar(total=1.0 if known else None, completed=progress or 0.0, pulse=False)
    grid.add_row(name, bar if known or picture.ending else Text(""), Text(where))
    return grid


def _busy(picture: Picture, now: float) -> Text:
    if picture.ending and not picture.busy:
        return Text(f"{picture.ending} after {duration_phrase(picture.at)}", "dim")
    since = duration_phrase(max(now - picture.busy_since, 0.0))
    within = picture.last is not None and picture.busy_progress is not None  # before the steps the bar shows it
    inside = f"{picture.busy_progress:.0%}, {since}" if within else since
    return Text(f"{picture.busy} ({inside}){left_phrase(picture.seconds_left)}", "dim")


def _curves(picture: Picture, width: int, ascii_only: bool) -> Iterator[Text]:
    """Yields a line for each curve that there is: its name, its last value, the curve, and what else is known."""
    if picture.last is not None:
        rate, seconds = (picture.last.get(key) for key in ("tokens_per_second", "seconds"))
        pace = f"{rate_phrase(rate)}, {duration_phrase(seconds)} a step" if rate and seconds else ""
        yield _curve("loss", picture.losses, pace, width, ascii_only)
    if picture.accuracies:
        yield _curve("accuracies", picture.accuracies, "", width, ascii_only)
    if picture.vals:
        best = f"best {_number(picture.best[1])} at step {picture.best[0]}" if picture.best else ""
        yield _curve("validation", [loss for _, loss in picture.vals], best, width, ascii_only)


def _curve(name: str, values: Sequence[float | None], more: str, width: int, ascii_only: bool) -> Text:
    head = f"{name:<10}  {_number(values[-1]):>7}  "
    room = width - len(head)
    if room < LEAST_CURVE + 2 + len(more):
        more = more.partition(", ")[0]  # the rate alone
    if room < LEAST_CURVE + 2 + len(more):
        more = ""
    signs = min(MOST_CURVE, room - len(more) - (2 if more else 0))
    curve = sparkline(values, max(signs, 1), ascii_only=ascii_only)
    gap = room - len(curve) - len(more)
    return Text.assemble(head, (curve, "cyan"), " " * max(gap, 0) if more else "", more)


def _nodes(nodes: Mapping[str, NodeRow], width: int, room: int) -> Iterator[Text]:
    """Yields a line for each node under the titles; the nodes that do not fit in `room` lines are counted instead."""
    if not nodes:
        return
    columns = _columns(nodes, width)
    titled = bool(columns) and room > min(len(nodes), 3)
    room -= titled
    shown = list(nodes.items()) if len(nodes) <= room else list(nodes.items())[: max(room - 1, 0)]
    name_width = _name_width(nodes, width)
    state_width = _state_width(nodes)
    if titled:
        titles = "".join(f"  {title:>{COLUMNS[title][0]}}" for title in columns)
        yield Text(f"{'node':<{name_width}}  {'state':<{state_width}}{titles}", "dim")
    for name, node in shown:
        fitting = name if len(name) <= name_width else name[: name_width - 1] + "…"
        state = (f"{node.state:<{state_width}}", STYLES.get(node.state, ""))
        numbers = "".join(f"  {COLUMNS[title][1](node) or '-':>{COLUMNS[title][0]}}" for title in columns)
        tells = numbers if node.state in WORKING else f"  {node.message}"
        yield Text.assemble(f"{fitting:<{name_width}}  ", state, tells)
    if len(shown) < len(nodes):
        yield Text(f"and {len(nodes) - len(shown)} more", "dim")


def _columns(nodes: Mapping[str, NodeRow], width: int) -> list[str]:
    """Returns the columns of which something is known, as many as fit."""
    known = [title for title, (_, cell) in COLUMNS.items() if any(map(cell, nodes.values()))]
    room = width - _name_width(nodes, width) - 2 - _state_width(nodes)
    needed = [sum(2 + COLUMNS[title][0] for title in known[: number + 1]) for number in range(len(known))]
    return [title for title, each in zip(known, needed, strict=True) if each <= room]


def _name_width(nodes: Mapping[str, NodeRow], width: int) -> int:
    return min(max(4, *map(len, nodes)), max(width // 3, 8))


def _state_width(nodes: Mapping[str, NodeRow]) -> int:
    return max(7, *(len(node.state) for node in nodes.values()))


def _size(gb: float) -> str:
    return f"{gb:.1f} GB" if gb >= 0.95 else f"{1000 * gb:.0f} MB"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _line(text: Text) -> Text:
    """Returns the text as one line, cut with an ellipsis where the terminal is too narrow."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
