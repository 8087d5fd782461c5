"""The display that a stream gets, and the live one: what stays on the screen, colors, the cursor, the end."""

import io
import re
import threading
from collections.abc import Callable, Mapping

import pytest
from rich.console import Console

from mlxdist.coordinator.report.display import Display, open_display
from mlxdist.coordinator.report.eta import new_progress, seconds_left
from mlxdist.coordinator.report.format import clock_phrase, duration_phrase, left_phrase, rate_phrase
from mlxdist.coordinator.report.live import LiveDisplay
from tests.coordinator.report.told import FakeClock, node, stage, train, val, work, worked


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class HungUp(io.StringIO):
    """A terminal whose window was closed."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def live_of(stream: io.StringIO, clock: FakeClock, width: int = 100, height: int = 24) -> LiveDisplay:
    return LiveDisplay(Console(file=stream, width=width, height=height), title="my-rows", clock=clock)


def kept(stream: io.StringIO) -> list[str]:
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_a_loss_and_a_pause_leave_a_line_with_their_time_and_loading_does_not(clock: FakeClock) -> None:
    stream = io.StringIO()
    live = live_of(stream, clock)
    live.take(node("mini-1", "loading", "reading the model"))
    lost = node("mini-1", "connecting", "the worker was killed; 2 leaves go to others", stays=True)
    live.take({**lost, "wall_seconds": 75.0})
    live.take(stage("paused: 0 of at least 1 nodes can work; waiting for more", paused=True))
    assert kept(stream) == [
        "01:15  mini-1: the worker was killed; 2 leaves go to others",
        "01:15  paused: 0 of at least 1 nodes can work; waiting for more",
    ]
    assert live._picture.busy == "waiting for nodes"


def test_a_long_sentence_wraps_beside_its_time(clock: FakeClock) -> None:
    stream = io.StringIO()
    live_of(stream, clock, width=30).say("a sentence that is longer than this terminal [is] wide")
    assert kept(stream) == ["00:00  a sentence that is", "       longer than this", "       terminal [is] wide"]


def test_the_end_leaves_the_last_screen_and_the_closing_sentence(clock: FakeClock) -> None:
    stream = io.StringIO()
    live = live_of(stream, clock)
    for event in (train(1, 1, at=2.0), work({"a": worked(4)}), {"event": "done", "status": "done"}):
        live.take(event)
    live.stage("waiting for the last metrics to be sent", None)
    waiting = live._console.render_lines(live.draw())
    assert "waiting" in "".join(segment.text for segment in waiting[2])
    live.end("the one step is done")
    shown = kept(stream)
    assert shown[0].endswith("step 1 of 1")
    assert shown[1] == "done after 2.0 s"
    assert shown[-1] == "00:02  the one step is done"
    assert live._console.render_lines(live.draw()) == []


def test_after_a_resize_the_last_sentences_that_fit_are_said_again_above_the_drawing(clock: FakeClock) -> None:
    stream = io.StringIO()
    live = live_of(stream, clock, height=10)
    live.take(train(1))
    for number in range(20):
        live.say(f"sentence {number}")
    stream.truncate(stream.seek(0))
    live.say_again()
    said = kept(stream)
    assert said == [f"00:00  sentence {number}" for number in range(20 - len(said), 20)]
    drawn = live._console.render_lines(live.draw(), pad=False)
    assert len(said) + len(drawn) == 9  # and the line of the cursor


def test_what_was_told_before_is_in_the_picture_and_only_its_last_sentences_are_said(clock: FakeClock) -> None:
    stream = io.StringIO()
    live = live_of(stream, clock)
    live.take(train(9))
    live.recall([train(1, at=2.0), val(1, 3.5, at=3.0), val(1, 1.5, at=4.0)], shown=1)
    assert kept(stream) == ["00:04  validation after step 1: loss 1.5"]
    assert len(live._picture.losses) == 1  # the ones before are told again, not once more


def shown(stream: io.StringIO, environ: Mapping[str, str], act: Callable[[Display], None]) -> str:
    with open_display(stream, title="my-rows", report_every=1, environ=environ) as display:
        act(display)
    return stream.getvalue()


def a_short_run(display: Display) -> None:
    display.take(stage("loading"))
    display.take(node("mini-1", "suspect", "no heartbeat for 6 s", stays=True))
    display.take(train(1, 2))
    display.take(val(1, 1.5))
    display.take(train(2, 2))
    display.end("Both steps are done.")


def test_a_terminal_keeps_the_sentences_and_a_pipe_gets_lines() -> None:
    on_terminal = shown(Terminal(), {"TERM": "xterm-256color"}, a_short_run)
    assert "\x1b[?25l" in on_terminal  # it hid the cursor
    assert "\x1b[?25h" in on_terminal  # and gave it back
    for sentence in ("validation after step 1: loss 1.5", "step 2 of 2", "Both steps are done."):
        assert sentence in on_terminal
    for stream, environ in [(io.StringIO(), {"TERM": "xterm"}), (Terminal(), {"TERM": "dumb"}), (Terminal(), {})]:
        lines = shown(stream, environ, a_short_run)
        assert "\x1b" not in lines
        assert [line[:7] for line in lines.splitlines()] == ["00:00  "] * 6


def test_no_color_is_respected() -> None:
    def colors(environ: Mapping[str, str]) -> bool:
        return re.search(r"\x1b\[[\d;]*3[1-8][;m]", shown(Terminal(), environ, a_short_run)) is not None

    assert colors({"TERM": "xterm-256color"})
    assert not colors({"TERM": "xterm-256color", "NO_COLOR": "1"})


def test_the_cursor_comes_back_when_the_run_fails() -> None:
    stream = Terminal()

    def fails(display: Display) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shown(stream, {"TERM": "xterm"}, fails)
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


def test_a_closed_window_does_not_end_the_run() -> None:
    assert shown(HungUp(), {}, a_short_run) == ""


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_that_knows_ascii_only_gets_no_blocks(terminal: bool) -> None:
    class Ascii(io.TextIOWrapper):
        def isatty(self) -> bool:
            return terminal

    raw = io.BytesIO()
    stream = Ascii(raw, encoding="ascii", newline="")
    with open_display(stream, title="t", report_every=1, environ={"TERM": "vt100"}) as display:
        for number in range(1, 9):
            display.take(train(number, 8, loss=9.0 - number))
        display.say("… busy")
        display.end("over")
    assert b"? busy" in raw.getvalue()
    assert (b"#*+=~-._" in raw.getvalue()) == terminal


def test_the_thread_of_a_display_ends_with_it() -> None:
    for stream in (io.StringIO(), Terminal()):
        shown(stream, {"TERM": "xterm"}, a_short_run)
    assert "ticks" not in {thread.name for thread in threading.enumerate()}


def test_time_left_counts_evaluations_between_steps_and_the_steps_of_a_resumed_run_alone(clock: FakeClock) -> None:
    steps = new_progress(clock)
    assert seconds_left(steps) is None
    task = steps.add_task("", total=111)
    steps.update(task, completed=101)  # the first step after --resume
    assert seconds_left(steps) is None
    for seconds, left in ((2, 18), (6, 32)):  # the second one has an evaluation before it
        clock.seconds += seconds
        steps.advance(task)
        assert seconds_left(steps) == left
    clock.seconds += 600
    steps.update(task, completed=111)
    assert seconds_left(steps) == 0


def test_time_left_follows_a_node_that_joins_and_is_known_where_steps_take_minutes(clock: FakeClock) -> None:
    steps = new_progress(clock)
    task = steps.add_task("", total=100)
    for seconds in [600] * 10 + [300] * 10:
        clock.seconds += seconds
        steps.advance(task)
    assert seconds_left(steps) == 80 * 300


def test_numbers_are_said_the_way_people_say_them() -> None:
    said = [duration_phrase(s) for s in (0.04, 9.94, 9.96, 59.4, 59.6, 185, 3599.6, 7620)]
    assert said == ["0.04 s", "9.9 s", "10 s", "59 s", "1 min 00 s", "3 min 05 s", "1 h 00 min", "2 h 07 min"]
    left = [left_phrase(s) for s in (None, 0.0, 0.2, 8.3, 185.0, 723.0, 7620.0)]
    assert left[:3] == ["", "", ", about 1 s left"]
    assert left[3:5] == [", about 8 s left", ", about 3 min 05 s left"]
    assert left[5:] == [", about 12 min left", ", about 2 h 07 min left"]
    assert [rate_phrase(r) for r in (0.42, 9.96, 812.3)] == ["0.4 tokens/s", "10.0 tokens/s", "812 tokens/s"]
    assert [clock_phrase(s) for s in (0, 72.9, 3723)] == ["00:00", "01:12", "1:02:03"]
