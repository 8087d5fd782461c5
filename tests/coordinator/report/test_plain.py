"""Plain lines: one for everything that is new, and none for what is not."""

import io
from itertools import pairwise

import pytest

from mlxdist.coordinator.report.plain import PlainDisplay
from tests.coordinator.report.told import FakeClock, node, saved, stage, train, val


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def plain(stream: io.StringIO, clock: FakeClock) -> PlainDisplay:
    return PlainDisplay(stream, report_every=10, clock=clock)


def pass_time(display: PlainDisplay, clock: FakeClock, seconds: float) -> None:
    """Half-second ticks, as their thread gives them."""
    for _ in range(round(seconds * 2)):
        clock.seconds += 0.5
        display.tick()


def lines(stream: io.StringIO) -> list[str]:
    """The lines without the time in front."""
    return [line.partition("  ")[2] for line in stream.getvalue().splitlines()]


def seconds(stream: io.StringIO) -> list[int]:
    """The time in front of each line."""
    times = [line.partition("  ")[0].split(":") for line in stream.getvalue().splitlines()]
    return [sum(60**place * int(part) for place, part in enumerate(reversed(time))) for time in times]


def steps_of(display: PlainDisplay, clock: FakeClock, count: int, each: float) -> None:
    """So many steps that take `each` seconds."""
    for number in range(1, count + 1):
        pass_time(display, clock, each)
        display.take(train(number, count, at=number * each, seconds=each))


def test_fast_steps_are_told_every_report_every_steps(
    plain: PlainDisplay, clock: FakeClock, stream: io.StringIO
) -> None:
    steps_of(plain, clock, 25, 0.5)
    assert [line.partition(":")[0] for line in lines(stream)] == [f"step {n} of 25" for n in (1, 10, 20, 25)]


def test_a_step_of_six_seconds_is_told_at_intervals_that_grow_with_the_run_and_nothing_between(
    plain: PlainDisplay, clock: FakeClock, stream: io.StringIO
) -> None:
    steps_of(plain, clock, 600, 6.0)  # an hour
    told = lines(stream)
    assert all(line.startswith("step ") for line in told)  # no line that only says that a step goes on
    gaps = [later - sooner for sooner, later in pairwise(seconds(stream))]
    assert max(gaps[:5]) <= 18
    assert max(gaps) <= 60  # every tenth step has its turn
    assert len(told) < 100


def test_steps_of_minutes_have_a_line_each(plain: PlainDisplay, clock: FakeClock, stream: io.StringIO) -> None:
    plain.take(stage("training"))
    for number in range(1, 9):
        clock.seconds += 240  # no tick falls into them
        plain.take(train(number, at=number * 240.0, seconds=240.0))
    assert len([line for line in lines(stream) if line.startswith("step")]) == 8


def test_a_step_that_takes_unusually_long_is_told_after_ever_longer_times(
    plain: PlainDisplay, clock: FakeClock, stream: io.StringIO
) -> None:
    steps_of(plain, clock, 20, 20.0)
    before = len(lines(stream))
    pass_time(plain, clock, 600)
    assert lines(stream)[before:] == [
        "… finishing, 30 s so far",
        "… finishing, 1 min 00 s so far",
        "… finishing, 2 min 00 s so far",
        "… finishing, 4 min 00 s so far",
        "… finishing, 8 min 00 s so far",
    ]


def test_a_long_step_is_said_beside_the_usual_time_of_one(
    plain: PlainDisplay, clock: FakeClock, stream: io.StringIO
) -> None:
    for number in range(1, 6):
        pass_time(plain, clock, 20)
        plain.take(train(number, at=number * 20.0, seconds=20.0))
    before = len(lines(stream))
    pass_time(plain, clock, 59.5)
    assert lines(stream)[before:] == []  # not yet unusual
    pass_time(plain, clock, 1)
    assert lines(stream)[before:] == ["… working on step 6, 1 min 00 s so far, usually 20 s"]


def test_a_night_of_waiting_is_a_short_log(plain: PlainDisplay, clock: FakeClock, stream: io.StringIO) -> None:
    plain.take(stage("paused: 0 of at least 1 nodes can work; waiting for more", paused=True))
    pass_time(plain, clock, 8 * 3600)
    assert lines(stream)[1] == "… waiting for nodes, 30 s so far"
    assert len(lines(stream)) < 60
    assert max(later - sooner for sooner, later in pairwise(seconds(stream))) <= 610


def test_a_stage_before_the_first_step_is_told_at_once_and_its_progress_when_it_takes_long(
    plain: PlainDisplay, clock: FakeClock, stream: io.StringIO
) -> None:
    plain.take(stage("loading the model"))
    for progress in (0.0, 0.2, 0.4):
        plain.stage("loading the model", progress)
    pass_time(plain, clock, 30)
    assert stream.getvalue().splitlines() == [
        "00:00  loading the model",
        "00:30  … loading the model (40%), 30 s so far",
    ]


def test_evaluations_and_saves_are_told_and_the_stages_between_steps_are_not(
    plain: PlainDisplay, stream: io.StringIO
) -> None:
    plain.take(train(50))
    plain.take(stage("scoring 8 validation rows"))
    plain.take(val(50, 1.5))
    plain.take(saved(50))
    assert lines(stream)[1:] == ["validation after step 50: loss 1.5", "saved checkpoints/step-00050"]


def test_a_nodes_loss_and_return_are_told_and_how_it_comes_up_but_not_its_daily_work(
    plain: PlainDisplay, stream: io.StringIO
) -> None:
    plain.take(node("mini-1", "loading"))
    plain.take(node("mini-1", "ready"))
    plain.take(node("mini-1", "busy"))
    plain.take(node("mini-1", "dead", "no heartbeat for 15 s", stays=True))
    for state in ("connecting", "loading"):
        plain.take(node("mini-1", state, "once more"))
    plain.take(node("mini-1", "ready", stays=True))
    assert lines(stream) == ["mini-1: loading", "mini-1: dead, no heartbeat for 15 s", "mini-1: ready"]


def test_nodes_that_come_up_have_a_line_each_and_what_they_wait_for_is_told_when_it_takes_long(
    plain: PlainDisplay, clock: FakeClock, stream: io.StringIO
) -> None:
    plain.take(stage("starting 2 nodes"))
    for name in ("a", "b"):
        plain.take(node(name, "connecting", "connected"))
        plain.take(node(name, "loading", "hashing the model's files"))
        plain.take(node(name, "loading", "loading the model"))
    plain.take(node("a", "ready"))
    plain.take(node("b", "refused", "too small"))
    assert lines(stream)[1:] == ["a: connected", "b: connected", "b: too small"]
    plain.take(node("c", "connecting", "connected"))
    pass_time(plain, clock, 30)
    assert lines(stream)[-1] == "… starting 2 nodes, 30 s so far; c: connected"


def test_a_node_that_joins_a_run_is_told_when_it_comes_and_when_it_can_work(
    plain: PlainDisplay, stream: io.StringIO
) -> None:
    plain.take(train(1))
    for state in ("connecting", "loading", "ready", "busy", "ready"):
        plain.take(node("late", state))
    assert lines(stream)[1:] == ["late: connecting", "late: ready"]


def test_the_time_left_stands_behind_a_step(plain: PlainDisplay, clock: FakeClock, stream: io.StringIO) -> None:
    steps_of(plain, clock, 50, 2.0)
    assert lines(stream)[1].endswith("a step, about 1 min 20 s left")
    assert "left" not in lines(stream)[-1]


def test_nothing_follows_the_closing_sentence(plain: PlainDisplay, clock: FakeClock, stream: io.StringIO) -> None:
    plain.take({"event": "done", "status": "done", "message": "in the file"})
    plain.stage("waiting for the last metrics to be sent", None)
    plain.end("All 4 steps are done.")
    pass_time(plain, clock, 300)
    assert lines(stream) == ["waiting for the last metrics to be sent", "All 4 steps are done."]


def test_what_was_told_before_is_not_told_again_but_for_the_sentences_that_are_asked_for(
    plain: PlainDisplay, clock: FakeClock, stream: io.StringIO
) -> None:
    before = [train(1, at=2.0), val(1, 1.5, at=3.0), stage("2 rows will be cut.", note=True), train(2, at=5.0)]
    plain.recall(before, shown=1)
    clock.seconds += 3
    plain.say("now")
    assert stream.getvalue() == "00:03  2 rows will be cut.\n00:08  now\n"
