"""The screen of a run on real terminals: a pseudo-terminal, tmux, simple ones, and a pipe; while their size changes."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.coordinator.overview.told_runs import make_run
from tests.coordinator.status.terminals import Terminal, command, environment, terminal, tmux, tmux_path
from tests.coordinator.status.test_looks import add, print_of, step_line

pytestmark = pytest.mark.slow

HIDE, SHOW, CLEAR = "\x1b[?25l", "\x1b[?25h", "\x1b[2J"
COLOR = re.compile(r"\x1b\[[\d;]*3[1-8][;m]")
DONE = json.dumps({"event": "done", "status": "done", "message": "all 8 steps are done"}) + "\n"
NODES = {
    f"mini-{number}": {
        "tokens_per_second": 100.0 * number,
        "peak_gb": 5.25,
        "state": "ready",
        "rows": [["leaf", 0.0, 9.0, 0, number]],
        "swap_gb": 0.0,
        "heat": "nominal",
    }
    for number in (1, 2, 3)
}
LOST = {
    "event": "node",
    "name": "mini-3",
    "state": "dead",
    "message": "not heard for 15 s; leaves [3, 6) go to others",
    "stays": True,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three nodes that this process holds, after 4 of its 8 steps."""
    path = make_run(tmp_path / "my-rows", ending=None)
    add(path, json.dumps({"event": "work", "step": 4, "nodes": NODES}) + "\n")
    return path


def status(run: Path) -> list[str]:
    return command("status", str(run), "--watch")


def end_of(shown: Terminal) -> str:
    """The rest of what is printed; the program has ended well then."""
    rest = shown.rest()
    assert shown.process.returncode == 0
    return rest


def test_a_terminal_shows_the_run_as_it_goes_on_and_keeps_the_last_screen(run: Path) -> None:
    with terminal(status(run), environment(TERM="xterm-256color")) as shown:
        first = shown.until("step 4 of 8")
        assert HIDE in first
        add(run, step_line(5) + "\n")
        shown.until("step 5 of 8")
        add(run, json.dumps(LOST) + "\n")
        shown.until("mini-3: dead, not heard for 15 s")
        add(run, DONE)
        rest = end_of(shown)
    assert COLOR.search(rest)
    assert "done after" in rest
    assert "all 8 steps are done" in rest
    assert rest.rindex(SHOW) > rest.rfind(HIDE)


def test_without_colors_the_screen_is_the_same(run: Path) -> None:
    with terminal(status(run), environment(TERM="xterm-256color", NO_COLOR="1")) as shown:
        first = shown.until("mini-3")
        add(run, DONE)
        rest = end_of(shown)
    assert HIDE in first
    assert not COLOR.search(first + rest)


def test_a_simple_terminal_and_a_pipe_get_plain_lines(run: Path) -> None:
    with terminal(status(run), environment(TERM="dumb")) as shown:
        shown.until("best so far")
        add(run, step_line(8) + "\n" + DONE)
        rest = end_of(shown)
    assert "step" not in rest or "\x1b" not in rest
    assert "all 8 steps are done" in rest
    piped = subprocess.run(
        status(run), env=environment(TERM="xterm-256color"), capture_output=True, text=True, check=True
    ).stdout
    assert "\x1b" not in piped
    assert piped.splitlines()[-1].endswith("  all 8 steps are done")


def test_after_a_change_of_size_the_screen_is_cleared_and_drawn_for_the_new_one(run: Path) -> None:
    with terminal(status(run), environment(TERM="xterm-256color")) as shown:
        wide = shown.until("nominal")
        assert "swap" in wide
        shown.resize(44, 15)
        narrow = shown.until(re.escape(CLEAR) + ".*mini-3[^\n]*\n?")
        assert "saved checkpoints" in narrow.partition(CLEAR)[2]  # the last sentence is there again
        after = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", narrow.partition(CLEAR)[2])
        assert max(map(len, after.replace("\r", "").split("\n"))) <= 44
        assert "swap" not in after.rpartition("node")[2]
        shown.resize(100, 30)
        assert "swap" in shown.until(re.escape(CLEAR) + ".*nominal")
        add(run, DONE)
        end_of(shown)


def test_ctrl_c_ends_the_view_alone_and_gives_the_cursor_back(run: Path) -> None:
    before = print_of(run)
    with terminal(status(run), environment(TERM="xterm-256color")) as shown:
        shown.until("step 4 of 8")
        shown.interrupt()
        assert SHOW in end_of(shown)
    assert print_of(run) == before


@pytest.mark.skipif(not tmux_path(), reason="there is no tmux")
def test_tmux_shows_one_calm_screen_at_any_size_and_nothing_of_the_ones_before(run: Path) -> None:
    with tmux(status(run), environment(TERM="xterm-256color"), 80, 24) as window:
        screen = window.until("^mini-3 .* nominal$")
        first_words = [line.split()[0] for line in screen[-8:]]
        assert first_words == ["my-rows", "working", "loss", "validation", "node", "mini-1", "mini-2", "mini-3"]
        add(run, json.dumps(LOST) + "\n")
        window.until("^mini-3 +dead +not heard for 15 s")
        for width, height in ((60, 20), (44, 12), (100, 30), (80, 24)):
            window.do("resize-window", "-x", str(width), "-y", str(height))
            wide = rf"^my-rows .{{{width - 20}}} step 4 of 8$"  # not yet where tmux has wrapped the line
            while (screen := window.until(wide))[-1].split()[0] != "mini-3":
                continue
            assert sum("my-rows" in line for line in screen) == 1
            assert max(map(len, screen)) <= width
            assert len(screen) <= height
            assert [line.split()[0] for line in screen[-3:]] == ["mini-1", "mini-2", "mini-3"]
            assert any("mini-3: dead" in line for line in screen) or height == 12  # the last sentence, where it fits
        add(run, DONE)
        last = window.ended()
        assert any("all 8 steps are done" in line for line in last)
        assert sum("my-rows" in line for line in last) == 1, last
        assert any("mini-3: dead, not heard for 15 s" in line for line in last)
