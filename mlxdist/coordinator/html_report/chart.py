"""Line charts: an SVG that stretches to any width, with its scales in HTML beside it, so that texts keep their size."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

Point = tuple[float, float]  # step, value

SIZE = 1000  # units of the drawing in both directions; lines keep their width when it is stretched
COLUMNS = 500  # of the drawing in which points are thinned
SMOOTH_FROM, SMOOTH_PART = 60, 25  # points from which a running mean is drawn, over such a part of them
HEADROOM = 0.06  # of the range of values, above and below


@dataclass(frozen=True)
class Series:
    """One line, its points in the order of their steps."""

    name: str
    points: Sequence[Point]
    color: int  # a number of the palette
    dots: bool = False  # few points, each drawn as a dot too
    dashed: bool = False
    best: Point | None = None  # a point that stands out
    exact: bool = False  # it is no measurement: no running mean


@dataclass(frozen=True)
class Tick:
    """A value of a scale, at a place from 0 (left, bottom) to 100."""

    place: float
    text: str


@dataclass(frozen=True)
class Line:
    """A series as it is drawn: paths of SVG."""

    name: str
    color: int
    path: str
    faint: str = ""  # the values themselves, where `path` is their running mean
    dots: str = ""
    best: tuple[float, float] | None = None  # place of the best point, from 0 to 100
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart for the page."""

    title: str
    lines: Sequence[Line]
    x: Sequence[Tick]
    y: Sequence[Tick]
    marks: Sequence[Tick] = ()  # vertical lines
    summary: str = ""  # for readers of the screen
    unit: str = ""
    notes: Sequence[str] = ()


def chart(title: str, series: Sequence[Series], *, unit: str = "", marks: Sequence[Point] = ()) -> Chart | None:
    """Returns the chart of some series; None where none has a point. `marks`: steps to mark, with any value."""
    drawn = [each for each in series if each.points]
    if not drawn:
        return None
    steps = [step for each in drawn for step, _ in each.points]
    values = [value for each in drawn for _, value in each.points]
    left, right = min(steps), max(steps)
    right = right if right > left else left + 1
    room = HEADROOM * (max(values) - min(values)) or abs(max(values)) * 0.1 or 1.0
    bottom, top = min(values) - room, max(values) + room

    def place(point: Point) -> Point:
        return (point[0] - left) / (right - left), (point[1] - bottom) / (top - bottom)

    lines = []
    for each in drawn:
        smooth = len(each.points) >= SMOOTH_FROM and not each.dots and not each.exact
        shown = running_mean(each.points) if smooth else each.points
        best = place(each.best) if each.best is not None else None
        lines.append(
            Line(
                each.name,
                each.color,
                path_of([place(point) for point in thinned(shown, left, right)]),
                path_of([place(point) for point in thinned(each.points, left, right)]) if smooth else "",
                dots_of([place(point) for point in each.points]) if each.dots or len(each.points) == 1 else "",
                (round(100 * best[0], 2), round(100 * best[1], 2)) if best is not None else None,
                each.dashed,
            )
        )
    return Chart(
        title,
        lines,
        [Tick(round(100 * place((at, 0))[0], 2), text) for at, text in ticks(left, right, whole=True)],
        [Tick(round(100 * place((0, at))[1], 2), text) for at, text in ticks(bottom, top)],
        [Tick(round(100 * place((at, 0))[0], 2), "") for at, _ in marks if left <= at <= right],
        "; ".join(summary_of(each) for each in drawn),
        unit,
        _notes(left, max(steps), any(line.faint for line in lines), bool(marks)),
    )


def _notes(first: float, last: float, smooth: bool, marked: bool) -> list[str]:
    """Returns what is to be said below a chart: its steps, and the meaning of its lines."""
    notes = [f"steps {first:,.0f} to {last:,.0f}"]
    notes += ["thin: every step, bold: running mean"] if smooth else []
    return notes + (["dashed: a node was lost or slow"] if marked else [])


def summary_of(series: Series) -> str:
    """'loss from 2.31 at step 1 to 1.02 at step 100'."""
    (first, before), (last, after) = series.points[0], series.points[-1]
    return f"{series.name} from {before:.4g} at step {first:.0f} to {after:.4g} at step {last:.0f}"


def thinned(points: Sequence[Point], left: float, right: float) -> Sequence[Point]:
    """Returns the points, or of many the first, lowest, highest and last of each column of the drawing."""
    if len(points) <= 4 * COLUMNS:
        return points
    kept: list[Point] = []
    for _, group in groupby(points, key=lambda point: int(COLUMNS * (point[0] - left) / (right - left))):
        column = list(group)
        low, high = min(column, key=lambda point: point[1]), max(column, key=lambda point: point[1])
        kept += sorted({column[0], low, high, column[-1]})
    return kept


def running_mean(points: Sequence[Point]) -> list[Point]:
    """Returns for each point the mean of those around it; at the two ends of fewer, but not of single points."""
    last = len(points) - 1
    reach = max(len(points) // SMOOTH_PART // 2, 2)
    sums = [0.0]
    for _, value in points:
        sums.append(sums[-1] + value)
    smooth = []
    for at, (step, _) in enumerate(points):
        near = max(min(reach, at, last - at), reach // 8)
        first, end = max(at - near, 0), min(at + near, last) + 1
        smooth.append((step, (sums[end] - sums[first]) / (end - first)))
    return smooth


def ticks(low: float, high: float, *, whole: bool = False, wanted: int = 5) -> Iterator[tuple[float, str]]:
    """Yields round values in [low, high] with their texts, about `wanted` of them; `whole`: whole numbers only."""
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    if whole:
        step = max(math.ceil(step), 1)
    at = math.ceil(low / step - 1e-9)
    while at * step <= high + 1e-9 * step:
        yield at * step, number(at * step, step)
        at += 1


def number(value: float, step: float) -> str:
    """Returns a value of a scale with such a step: with the digits that the step has."""
    if round(value / step) == 0:
        return "0"
    if step < 1e-4 or abs(value) >= 1e6:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:,.{digits + (round(step * 10**digits, 6) % 1 != 0)}f}"


def path_of(places: Sequence[Point]) -> str:
    """Returns the path of SVG through some places from 0 to 1; y grows upwards."""
    return "".join(f"{'L' if at else 'M'}{_x(x)} {_y(y)}" for at, (x, y) in enumerate(places))


def dots_of(places: Sequence[Point]) -> str:
    """Returns a path of lines without length, which round caps make dots."""
    return "".join(f"M{_x(x)} {_y(y)}h0" for x, y in places)


def _x(x: float) -> str:
    return f"{SIZE * x:.1f}"


def _y(y: float) -> str:
    return f"{SIZE * (1 - y):.1f}"
