"""Charts show what was measured: every extreme of a long run, round scales, and a place for each step."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxdist.coordinator.html_report.chart import COLUMNS, Series, chart, running_mean, thinned, ticks


def test_points_stand_where_their_values_are() -> None:
    made = chart("Loss", [Series("a", [(1, 0.0), (2, 50.0), (3, 100.0)], 0, best=(2, 50.0))])
    assert made is not None
    places = [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", made.lines[0].path)]
    assert [x for x, _ in places] == [0.0, 500.0, 1000.0]
    assert [round(y) for _, y in places] == [946, 500, 54]  # a little room above and below
    assert made.lines[0].best == (50.0, 50.0)
    assert [(tick.text, tick.place) for tick in made.x] == [("1", 0.0), ("2", 50.0), ("3", 100.0)]
    assert [tick.text for tick in made.y] == ["0", "25", "50", "75", "100"]


def test_a_chart_without_a_point_is_none_and_one_point_is_a_dot() -> None:
    assert chart("Loss", [Series("a", [], 0)]) is None
    made = chart("Loss", [Series("a", [(5, 2.0)], 0)])
    assert made is not None
    assert made.lines[0].dots


def test_a_hundred_thousand_steps_keep_every_peak_and_stay_small() -> None:
    points = [(float(step), math.sin(step)) for step in range(100_000)]
    points[77_777] = (77_777.0, 40.0)
    kept = thinned(points, 0, 99_999)
    assert len(kept) <= 4 * (COLUMNS + 1)
    assert (77_777.0, 40.0) in kept
    assert [step for step, _ in kept] == sorted(step for step, _ in kept)
    made = chart("Loss", [Series("a", points, 0)])
    assert made is not None
    assert len(made.lines[0].path) + len(made.lines[0].faint) < 80_000


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0.0, 1.0, ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0.0, 0.01, ["0", "0.002", "0.004", "0.006", "0.008", "0.010"]),
        (0.0, 1.2, ["0", "0.25", "0.50", "0.75", "1.00"]),
        (-1.3, 2.2, ["-1", "0", "1", "2"]),
        (900.0, 4500.0, ["1,000", "2,000", "3,000", "4,000"]),
        (0.0, 2e-4, ["0", "5e-5", "1e-4", "1.5e-4", "2e-4"]),
    ],
)
def test_a_scale_has_round_values_with_as_many_digits_as_they_need(low: float, high: float, texts: list[str]) -> None:
    assert [text for _, text in ticks(low, high)] == texts


@given(st.floats(-1e6, 1e6), st.floats(1e-2, 1e6))
def test_every_scale_has_a_few_values_inside_of_it(low: float, span: float) -> None:
    values = [value for value, _ in ticks(low, low + span)]
    assert 2 <= len(values) <= 8
    assert all(low - 1e-6 * span <= value <= low + span * (1 + 1e-6) for value in values)


def test_a_running_mean_of_many_steps_ends_as_calmly_as_it_goes() -> None:
    noisy = [(float(step), float(step % 2)) for step in range(10_000)]
    assert all(abs(value - 0.5) < 0.03 for _, value in running_mean(noisy))


def test_a_running_mean_keeps_the_ends_and_a_straight_line() -> None:
    line = [(float(step), 2.0 * step) for step in range(200)]
    assert [value for _, value in running_mean(line)] == pytest.approx([value for _, value in line])
