"""The screen of a run: everything that events told, at any width, and nothing that they did not."""

import io
from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mlxdist.coordinator.report.drawing import draw
from mlxdist.coordinator.report.picture import Event, Picture, news_in, recalled
from mlxdist.coordinator.report.sparkline import BLOCKS, sparkline, thinned
from tests.coordinator.report.told import node, saved, stage, train, val, work, worked


def picture_of(*events: Event) -> Picture:
    return recalled(events, 0)[0]


def screen(picture: Picture, width: int = 80, height: int = 24, now: float | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None, highlight=False)
    with console.capture() as capture:
        seconds = picture.at if now is None else now
        console.print(draw(picture, "my-rows", seconds, width=width, height=height))
    return [line.rstrip() for line in capture.get().splitlines()]


def a_run() -> list[Event]:
    """45 of 100 steps, one evaluation, two nodes of which one is silent."""
    steps = [train(number, at=2.0 * number, loss=5 - number / 15) for number in range(1, 46)]
    nodes = {"mini-1": worked(5, swap_gb=0.0, heat="nominal"), "mini-2": worked(3, 245.5, swap_gb=1.5, heat="heavy")}
    last = node("mini-2", "suspect", "no heartbeat for 6 s", stays=True)
    return [*steps[:40], val(40, 2.5, at=81.0), saved(40), *steps[40:], work(nodes), last]


def test_the_screen_has_the_progress_the_curves_and_a_row_for_each_node() -> None:
    bar, busy, loss, validation, titles, *nodes = screen(picture_of(*a_run()), now=91.0)
    assert bar.startswith("my-rows ━")
    assert bar.endswith("step 45 of 100")
    assert busy == "working on step 46 (1.0 s), about 1 min 50 s left"
    assert loss.startswith("loss         2.0000  █")
    assert loss.endswith("▁  40 tokens/s, 2.0 s a step")
    assert validation.split() == ["validation", "2.5000", "▁", "best", "2.5000", "at", "step", "40"]
    assert titles.split() == ["node", "state", "share", "tokens/s", "memory", "swap", "heat"]
    assert nodes == [
        "mini-1  busy      62 %       410   5.2 GB     0 MB   nominal",
        "mini-2  suspect  no heartbeat for 6 s",
    ]


def test_what_nothing_tells_is_left_out_and_what_one_node_does_not_tell_is_a_dash() -> None:
    events = [train(1), work({"linux": worked(1), "mac": worked(1, heat="nominal")})]
    titles, *nodes = screen(picture_of(*events))[3:]
    assert titles.split() == ["node", "state", "share", "tokens/s", "memory", "heat"]
    assert [row.split()[-1] for row in nodes] == ["-", "nominal"]
    assert len(screen(picture_of(stage("loading")))) == 2


@pytest.mark.parametrize("width", [12, 20, 40, 60, 80, 200])
@pytest.mark.parametrize("height", [1, 3, 6, 10, 24])
def test_no_line_is_wider_than_the_terminal_and_no_more_lines_than_it_has(width: int, height: int) -> None:
    many = {f"the-mac-mini-in-room-{number}": worked(number, swap_gb=0.1, heat="nominal") for number in range(12)}
    losing = node("the-mac-mini-in-room-3", "dead", "not heard for 15 s, and more words than fit", stays=True)
    for events in ([*a_run(), work(many), losing], [stage("loading", progress=0.5), losing], []):
        drawn = screen(picture_of(*events), width, height)
        assert len(drawn) <= height
        assert max(map(len, drawn), default=0) <= width


def test_on_a_narrow_terminal_the_share_stays_longest() -> None:
    assert screen(picture_of(*a_run()), 44)[4].split() == ["node", "state", "share", "tokens/s", "memory"]
    assert screen(picture_of(*a_run()), 28)[4].split() == ["node", "state", "share"]


def test_nodes_that_do_not_fit_are_counted() -> None:
    many = [node(f"mini-{number}", "busy") for number in range(12)]
    drawn = screen(picture_of(*many), 60, height=8)
    assert len(drawn) == 8
    assert drawn[-1] == "and 7 more"


def test_a_run_without_a_last_step_shows_the_time_left_of_its_hours_or_none() -> None:
    assert "left" not in "".join(screen(picture_of(train(3, None))))
    by_hours = train(30, None, at=900.0, progress=0.25, elapsed_seconds=900.0)
    assert "about 45 min left" in screen(picture_of({**by_hours, "progress": 0.25}))[1]


def test_before_the_first_step_the_bar_is_that_of_the_stage() -> None:
    drawn = screen(picture_of(stage("tokenizing", progress=0.5)))
    assert drawn[0].endswith("50%")
    assert drawn[1] == "tokenizing (0.00 s)"


@pytest.mark.parametrize(
    ("status", "said"),
    [("done", "done after 2.0 s"), ("failed", "failed after 2.0 s"), ("stopped", "stopped after 2.0 s")],
)
def test_the_end_of_a_run_takes_the_place_of_its_work(status: str, said: str) -> None:
    assert screen(picture_of(train(1, at=2.0), {"event": "done", "status": status}), now=99.0)[1] == said


def test_a_run_that_was_resumed_after_its_end_goes_on() -> None:
    picture = picture_of(train(1), {"event": "done", "status": "interrupted"}, stage("starting 3 nodes"))
    assert (picture.ending, picture.busy) == ("", "starting 3 nodes")


def test_a_node_that_works_again_has_its_numbers_again() -> None:
    events = [work({"a": worked(1)}), node("a", "connecting", "the worker was killed", stays=True)]
    assert "killed" in screen(picture_of(*events))[-1]
    assert "busy" in screen(picture_of(*events, node("a", "ready"), work({"a": worked(1)})))[-1]


def test_a_loss_that_is_not_finite_is_seen() -> None:
    drawn = screen(picture_of(train(1), train(2, loss=None)))
    assert "not finite" in drawn[2]
    assert "▁!" in drawn[2]


def test_events_of_an_older_mlxdist_lack_keys_and_unknown_ones_are_passed_over() -> None:
    old: Iterable[Mapping[str, object]] = [
        {"event": "train", "step": 1, "loss": 2.0},
        {"event": "work", "nodes": {"a": {}}},
        {"event": "node", "name": "a"},
        {"event": "stage"},
        {"event": "of tomorrow", "step": "x"},
        {},
    ]
    assert screen(picture_of(*old))[0].endswith("step 1")


def test_sentences_that_stay_are_told_from_daily_work() -> None:
    assert [news_in(event) for event in (train(1), stage("loading"), node("a", "busy"), work({}))] == [None] * 4
    assert news_in(stage("2 rows will be cut.", note=True)) == "2 rows will be cut."
    assert news_in(node("a", "dead", "not heard", stays=True)) == "a: dead, not heard"


def test_a_curve_falls_where_the_values_fall_and_has_one_sign_for_each() -> None:
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1], 8) == BLOCKS[::-1]
    assert sparkline([1.0, 1.0], 8) == "▁▁"
    assert sparkline([1.0, None, 2.0], 8) == "▁!█"
    assert sparkline([], 8) == ""
    assert sparkline([3.0, 1.0], 8, ascii_only=True) == "#_"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 80))
def test_a_thinned_curve_keeps_the_mean_and_the_width(values: list[float], width: int) -> None:
    parts = thinned(values, width)
    assert len(parts) == min(len(values), width)
    assert len(sparkline(values, width)) == len(parts)
    known = [part for part in parts if part is not None]
    assert min(values) - 1e-3 <= min(known)
    assert max(known) <= max(values) + 1e-3
