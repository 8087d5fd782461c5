"""The person's view of a run: never silent for long, never chatty over night, one line per node, any width."""

import io
import re
import threading
from collections.abc import Callable, Mapping
from itertools import pairwise

import pytest
from rich.console import Console

from mlxdist.coordinator.report.display import Display, open_display
from mlxdist.coordinator.report.eta import new_progress, seconds_left
from mlxdist.coordinator.report.format import StepReport, clock_phrase, duration_phrase, left_phrase, rate_phrase
from mlxdist.coordinator.report.live import LiveDisplay
from mlxdist.coordinator.report.plain import PlainDisplay


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.seconds = 500.0

    def __call__(self) -> float:
        return self.seconds


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


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def plain(stream: io.StringIO, clock: FakeClock) -> PlainDisplay:
    return PlainDisplay(stream, report_every=10, clock=clock)


def step(
    number: int, total: int | None = 100, speeds: Mapping[str, float] | None = None, **metrics: float
) -> StepReport:
    """80 of 200 tokens are supervised, in 2 s."""
    return StepReport(number, total, {"loss": 2.0, **metrics}, 1.5, 2e-4, 80, 200, 2.0, node_speeds=speeds or {})


def pass_time(display: PlainDisplay, clock: FakeClock, seconds: float) -> None:
    """Half-second ticks, as the heartbeat thread gives them."""
    for _ in range(round(seconds * 2)):
        clock.seconds += 0.5
        display.tick()


def test_fast_steps_are_told_every_report_every_steps(
    plain: PlainDisplay, clock: FakeClock, stream: io.StringIO
) -> None:
    for number in range(1, 26):
        clock.seconds += 0.25
        plain.step(step(number, 25))
    assert [line.split(":")[1][2:] for line in stream.getvalue().splitlines()] == [
        "  step 1 of 25",
        "  step 10 of 25",
        "  step 20 of 25",
        "  step 25 of 25",
    ]


def test_slow_steps_are_told_one_by_one(plain: PlainDisplay, clock: FakeClock, stream: io.StringIO) -> None:
    for number in range(1, 6):
        clock.seconds += 4.5
        plain.step(step(number))
    assert len(stream.getvalue().splitlines()) == 5


def test_it_is_never_silent_for_more_than_five_seconds_in_a_long_stage(
    plain: PlainDisplay, clock: FakeClock, stream: io.StringIO
) -> None:
    plain.stage("loading the model", None)
    pass_time(plain, clock, 120)
    lines = stream.getvalue().splitlines()
    told = [int(line[:2]) * 60 + int(line[3:5]) for line in lines]
    assert max(b - a for a, b in pairwise(told)) <= 5
    assert "… loading the model, 4.5 s so far" in lines[1]


def test_over_night_a_line_a_minute_is_enough(plain: PlainDisplay, clock: FakeClock, stream: io.StringIO) -> None:
    plain.stage("loading the model", None)
    pass_time(plain, clock, 600)
    before = len(stream.getvalue().splitlines())
    pass_time(plain, clock, 600)
    assert len(stream.getvalue().splitlines()) - before <= 10


def test_the_heartbeat_tells_progress_and_speeds(plain: PlainDisplay, clock: FakeClock, stream: io.StringIO) -> None:
    plain.step(step(1, speeds={"mini-1": 410.0}))
    plain.stage("evaluating", 0.0)
    plain.stage("evaluating", 0.4)
    pass_time(plain, clock, 5)
    assert stream.getvalue().splitlines() == [
        "00:00  step 1 of 100: loss 2.0000, 40 tokens/s, 2.0 s a step",
        "00:00  evaluating",
        "00:04  … evaluating (40%), 4.5 s so far; mini-1 410 tokens/s",
    ]


def test_nothing_follows_the_closing_sentence(plain: PlainDisplay, clock: FakeClock, stream: io.StringIO) -> None:
    plain.end("All 4 steps are done.")
    pass_time(plain, clock, 30)
    assert stream.getvalue() == "00:00  All 4 steps are done.\n"


def test_plain_lines_tell_a_nodes_loss_and_return_but_not_its_daily_work(
    plain: PlainDisplay, stream: io.StringIO
) -> None:
    plain.node("mini-1", "loading", "", stays=False)
    plain.node("mini-1", "ready", "", stays=False)
    plain.node("mini-1", "busy", "", stays=False)
    plain.node("mini-1", "dead", "no heartbeat for 15 s", stays=True)
    for state in ("connecting", "loading"):
        plain.node("mini-1", state, "once more", stays=False)
    plain.node("mini-1", "ready", "", stays=True)
    assert [line[7:] for line in stream.getvalue().splitlines()] == [
        "mini-1: loading",
        "mini-1: dead, no heartbeat for 15 s",
        "mini-1: ready",
    ]


def test_a_pause_is_told_at_both_ends_and_waits_with_a_heartbeat(
    plain: PlainDisplay, clock: FakeClock, stream: io.StringIO
) -> None:
    plain.pause("paused: 0 of at least 1 nodes can work; waiting for more", over=False)
    pass_time(plain, clock, 5)
    plain.pause("going on after 5 s: 1 of at least 1 nodes can work", over=True)
    assert [line[7:] for line in stream.getvalue().splitlines()] == [
        "paused: 0 of at least 1 nodes can work; waiting for more",
        "… waiting for nodes, 4.5 s so far",
        "going on after 5 s: 1 of at least 1 nodes can work",
    ]


def test_on_a_terminal_a_loss_and_a_pause_leave_a_line_and_loading_does_not(clock: FakeClock) -> None:
    stream = io.StringIO()
    live = LiveDisplay(Console(file=stream, width=100), title="my-rows", clock=clock)
    live.node("mini-1", "loading", "reading the model", stays=False)
    live.node("mini-1", "connecting", "the worker was killed; 2 leaves go to others", stays=True)
    live.pause("paused: 0 of at least 1 nodes can work; waiting for more", over=False)
    assert stream.getvalue().splitlines() == [
        "mini-1: the worker was killed; 2 leaves go to others",
        "paused: 0 of at least 1 nodes can work; waiting for more",
    ]
    console = console_of(80)
    assert "waiting for nodes" in "\n".join(screen(live, console))


def screen(display: LiveDisplay, console: Console) -> list[str]:
    with console.capture() as capture:
        console.print(display.draw())
    return capture.get().splitlines()


def console_of(width: int, height: int = 24) -> Console:
    return Console(file=io.StringIO(), width=width, height=height, color_system=None, highlight=False)


def test_the_live_display_shows_step_numbers_work_and_nodes(clock: FakeClock) -> None:
    console = console_of(80)
    live = LiveDisplay(console, title="my-rows", clock=clock)
    live.node("mini-1", "busy", "", stays=False)
    live.node("mini-2", "suspect", "no heartbeat for 6 s", stays=True)
    for number in range(1, 46):
        clock.seconds += 2
        live.step(step(number, speeds={"mini-1": 410.0}))
    clock.seconds += 1
    bar, numbers, busy, *nodes = screen(live, console)
    assert bar.startswith("my-rows ━")
    assert bar.rstrip().endswith("step 45 of 100")
    assert numbers == "loss 2.0000, 40 tokens/s, 2.0 s a step"
    assert busy == "working on step 46 (1.0 s), about 1 min 50 s left"
    assert nodes == ["  mini-1  busy        410 tokens/s", "  mini-2  suspect     no heartbeat for 6 s"]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal_nor_wraps(clock: FakeClock, width: int) -> None:
    console = console_of(width)
    live = LiveDisplay(console, title="a-run-with-a-rather-long-name", clock=clock)
    for number in range(3):
        live.node(f"the-mac-mini-in-room-{number}", "loading", "reading the model from the hub, 412 of 987 MB")
    live.stage("evaluating after step 45 on all of the validation rows", 0.5)
    assert len(screen(live, console)) == 5
    live.step(step(45, **{"rewards/accuracies": 0.5}))
    drawn = screen(live, console)
    assert len(drawn) == 6
    assert max(map(len, drawn)) <= width


def test_nodes_that_do_not_fit_are_counted(clock: FakeClock) -> None:
    console = console_of(60, height=10)
    live = LiveDisplay(console, title="t", clock=clock)
    for number in range(12):
        live.node(f"mini-{number}", "busy", "")
    drawn = screen(live, console)
    assert len(drawn) <= 8
    assert drawn[-1] == "  and 7 more"


def test_a_run_without_a_last_step_shows_no_time_left(clock: FakeClock) -> None:
    console = console_of(80)
    live = LiveDisplay(console, title="t", clock=clock)
    live.step(step(3, None))
    assert "left" not in "".join(screen(live, console))


def shown(stream: io.StringIO, environ: Mapping[str, str], act: Callable[[Display], None]) -> str:
    with open_display(stream, title="my-rows", report_every=1, environ=environ) as display:
        act(display)
    return stream.getvalue()


def a_short_run(display: Display) -> None:
    display.stage("loading", None)
    display.node("mini-1", "suspect", "no heartbeat for 6 s", stays=True)
    display.step(step(1, 2))
    display.val(1, 1.5, {"rewards/accuracies": 0.75})
    display.step(step(2, 2))
    display.end("Both steps are done.")


def test_a_terminal_keeps_the_sentences_and_a_pipe_gets_lines() -> None:
    on_terminal = shown(Terminal(), {"TERM": "xterm-256color"}, a_short_run)
    assert "\x1b[?25l" in on_terminal  # it hid the cursor
    assert "\x1b[?25h" in on_terminal  # and gave it back
    kept = [
        "validation after step 1: loss 1.5000, rewards/accuracies 0.75",
        "step 2 of 2: loss",
        "Both steps are done.",
    ]
    for sentence in kept:
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


def test_a_terminal_that_knows_ascii_only_gets_question_marks() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", newline="")
    with open_display(stream, title="t", report_every=1, environ={}) as display:
        display.say("… busy")
    assert raw.getvalue() == b"00:00  ? busy\n"


def test_the_heartbeat_thread_ends_with_the_display() -> None:
    shown(io.StringIO(), {}, a_short_run)
    assert "heartbeat" not in {thread.name for thread in threading.enumerate()}


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
