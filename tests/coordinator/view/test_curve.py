"""The thinning of curves: fewer points, the same picture."""

import math

import numpy as np
import numpy.typing as npt
from hypothesis import example, given
from hypothesis import strategies as st

from mlxdist.coordinator.view.curve import Curve, thinned

values = st.floats(-1e6, 1e6) | st.just(math.nan)
points = st.lists(st.tuples(st.integers(1, 5), values), min_size=1, max_size=400)


def curve_of(pairs: list[tuple[int, float]]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Steps with gaps between them, and their values."""
    return np.cumsum([gap for gap, _ in pairs]).astype(float), np.array([value for _, value in pairs])


@given(points, st.integers(1, 40))
@example([(1, 2.0), (1, 9.0), (1, 1.0), (1, math.nan), (1, 3.0)], 1)  # a peak beside a gap
def test_the_least_and_the_greatest_value_and_a_gap_of_every_pixel_survive(
    pairs: list[tuple[int, float]], pixels: int
) -> None:
    steps, values = curve_of(pairs)
    kept_steps, kept = thinned(steps, values, pixels)
    if len(steps) <= 3 * pixels:
        assert len(kept) == len(values)
        return
    width = steps[-1] - steps[0]
    for pixel in range(pixels):

        def inside(some: npt.NDArray[np.float64], pixel: int = pixel) -> npt.NDArray[np.bool_]:
            return np.asarray(np.minimum((some - steps[0]) / width * pixels, pixels - 1).astype(int) == pixel)

        whole, few = values[inside(steps)], kept[inside(kept_steps)]
        if not len(whole):
            assert not len(few)
            continue
        assert np.isnan(whole).any() == np.isnan(few).any()
        if not np.isnan(whole).all():
            assert np.nanmin(whole) == np.nanmin(few)
            assert np.nanmax(whole) == np.nanmax(few)


@given(points, st.integers(1, 40))
def test_both_ends_are_kept_every_point_is_one_of_the_curve_and_they_are_few(
    pairs: list[tuple[int, float]], pixels: int
) -> None:
    steps, values = curve_of(pairs)
    kept_steps, kept = thinned(steps, values, pixels)
    assert (kept_steps[0], kept_steps[-1]) == (steps[0], steps[-1])
    places = np.searchsorted(steps, kept_steps)
    np.testing.assert_array_equal(kept, values[places])
    assert (np.diff(kept_steps) > 0).all()
    assert len(kept) <= 3 * pixels + 2


def test_a_range_has_one_point_more_on_each_side_so_that_lines_reach_the_edges() -> None:
    curve = Curve()
    for step in range(1, 101):
        curve.add(step, step / 2)
    steps, values = curve.points(20, 30, 600)
    assert steps == list(range(19, 32))
    assert values[0] == 9.5


def test_a_value_that_is_not_finite_is_a_gap_and_a_step_done_again_replaces_the_later_ones() -> None:
    curve = Curve()
    for step, value in enumerate([1.0, None, float("nan"), 4.0], 1):
        curve.add(step, value)
    assert curve.points(0, 10, 100) == ([1, 2, 3, 4], [1.0, None, None, 4.0])
    curve.add(2, 7)
    assert curve.points(0, 10, 100) == ([1, 2], [1.0, 7.0])
    assert curve.last == 7.0
