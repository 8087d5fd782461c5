"""A run is looked at by its files alone: they stay as they are, and what they do not say is not made up."""

import hashlib
import io
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from mlxdist.coordinator.report.display import open_display
from mlxdist.coordinator.report.event_log import MOST_LINES
from mlxdist.coordinator.status.looks import LocalRun, Look
from mlxdist.coordinator.status.show import facts_of, run_named, show_status
from mlxdist.coordinator.status.watch import ELSEWHERE, STOPPED, show_to_the_end
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.protocol.errors import UserError
from tests.coordinator.overview.told_runs import make_run


def no_wait() -> None:
    """The next look comes at once."""


def look_at(path: Path, **more: Any) -> LocalRun:
    return LocalRun(path, wait=no_wait, **more)


def steps_in(look: Look) -> list[int]:
    return [event["step"] for event in look.events if event["event"] == "train"]


def add(path: Path, text: str) -> None:
    with RunFolder(path).metrics_jsonl.open("a", encoding="utf-8") as file:
        file.write(text)


def step_line(number: int) -> str:
    return json.dumps({"event": "train", "step": number, "total_steps": 8, "loss": 1.0, "wall_seconds": 9.0 + number})


def kill(path: Path) -> None:
    """Leaves the lock as a coordinator that was killed: its process id is another program's by now."""
    os.utime(RunFolder(path).state / "lock", (0, 0))


def shown(name: str, **options: bool) -> str:
    stream = io.StringIO()
    given = {"watch": False, "as_json": False, **options}
    show_status(name, None, stream=stream, environ={}, **given)
    return stream.getvalue()


def print_of(folder: Path) -> dict[str, tuple[str, int, int, int]]:
    """Each file and folder with the hash of its bytes, its times and its mode."""
    found = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        state = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path)] = (content, state.st_mtime_ns, state.st_ctime_ns, state.st_mode)
    return found


def test_nothing_of_a_run_is_touched(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", ending=None)
    add(path, step_line(5)[:20])
    before = print_of(path)
    shown(str(path))
    shown(str(path), as_json=True)
    kill(path)
    killed = print_of(path)
    shown(str(path), watch=True)
    assert print_of(path) == killed
    assert {name: each[0] for name, each in killed.items()} == {name: each[0] for name, each in before.items()}
    assert before.keys() == killed.keys()


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Takes the right to write away; root needs a user who has it not."""
    paths = [folder, *folder.rglob("*")]
    modes = {path: path.stat().st_mode for path in paths}
    for path in paths:
        path.chmod(modes[path] & 0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        for path, mode in modes.items():
            path.chmod(mode)


def test_a_folder_that_cannot_be_written_to_is_looked_at(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    parents = [parent for parent in tmp_path.parents if parent.stat().st_mode & 0o005 != 0o005]
    modes = {parent: parent.stat().st_mode for parent in (tmp_path, *parents)}
    for parent in modes:
        parent.chmod(0o755)
    try:
        with read_only(path):
            assert "done after" in shown(str(path))
            assert "over" in shown(str(path), watch=True)
    finally:
        for parent, mode in modes.items():
            parent.chmod(mode)


def test_a_file_that_grows_is_read_from_where_it_was_and_half_a_line_waits_for_its_rest(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", ending=None)
    run = look_at(path)
    first = run.look()
    assert (first.whole, steps_in(first)) == (True, [1, 2, 3, 4])
    line = step_line(5)
    add(path, line[:30])
    assert steps_in(run.look()) == []
    add(path, line[30:] + "\n" + step_line(6) + "\n")
    second = run.look()
    assert (second.whole, steps_in(second)) == (False, [5, 6])
    assert steps_in(run.look()) == []


def test_a_long_file_is_one_look(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", ending=None)
    count = 2 * MOST_LINES + 5
    add(path, "".join(f"{step_line(number)}\n" for number in range(5, count)))
    run = look_at(path)
    assert steps_in(run.look()) == [*range(1, count)]
    assert steps_in(run.look()) == []


def test_a_line_that_a_crash_tore_is_passed_over(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", ending=None)
    add(path, step_line(5)[:30] + "\n" + '["no event"]\n\x00\n' + step_line(6) + "\n")
    assert steps_in(look_at(path).look()) == [1, 2, 3, 4, 6]


def test_a_file_that_a_resumed_run_has_replaced_or_cut_is_read_from_its_begin(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", ending=None)
    run, file = look_at(path), RunFolder(path).metrics_jsonl
    assert steps_in(run.look()) == [1, 2, 3, 4]
    kept = b"".join(line for line in file.read_bytes().splitlines(keepends=True) if b'"step": 4' not in line)
    (path / "aside").write_bytes(kept)
    (path / "aside").replace(file)
    replaced = run.look()
    assert (replaced.whole, steps_in(replaced)) == (True, [1, 2, 3])
    file.write_text(step_line(1) + "\n")
    cut = run.look()
    assert (cut.whole, steps_in(cut)) == (True, [1])
    file.unlink()
    gone = run.look()
    assert (gone.whole, steps_in(gone)) == (True, [])


def test_a_run_that_trains_one_that_was_killed_and_one_on_another_mac_are_told_apart(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", ending=None)
    state = json.loads(shown(str(path), as_json=True))
    assert (state["state"], state["step"], state["best_validation"]) == ("training", 4, {"step": 4, "loss": 1.0})
    assert "working on step 5" in shown(str(path))

    kill(path)
    assert json.loads(shown(str(path), as_json=True))["state"] == "stopped"
    assert STOPPED.partition("{")[0] in " ".join(shown(str(path)).split())

    lock = RunFolder(path).state / "lock"
    lock.write_text(f"{os.getpid()} of-another-{platform.node()}\n")
    assert json.loads(shown(str(path), as_json=True))["state"] == "unknown"
    assert ELSEWHERE in " ".join(shown(str(path)).split())


def test_a_run_that_has_ended_says_how_whatever_its_lock_says(tmp_path: Path) -> None:
    for ending in ("done", "interrupted", "failed"):
        path = make_run(tmp_path / ending, ending=ending)  # type: ignore[arg-type]
        assert json.loads(shown(str(path), as_json=True))["state"] == ending
        assert f"{ending} after" in shown(str(path))
        assert shown(str(path), watch=True).splitlines()[-1].endswith("  over")


def test_the_age_of_the_last_event_is_by_the_clock_of_its_host_and_never_negative(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", ending=None)
    told = datetime.fromisoformat([event["time"] for event in look_at(path).look().events][-1]).timestamp()
    for later, age in ((7200.0, 7200.0), (-7200.0, 0.0)):  # two hours of silence; a clock that is behind
        assert facts_of(look_at(path, wall=lambda at=told + later: at))["seconds_since_last_event"] == age  # type: ignore[misc]
    kill(path)
    stream = io.StringIO()
    with open_display(stream, title="t", report_every=1, environ={}) as display:
        show_to_the_end(look_at(path, wall=lambda: told + 7200), display)
    assert stream.getvalue().endswith("Its last event is 2 h 00 min old\n")


def test_a_run_is_watched_until_it_tells_its_end(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", ending=None)
    add(path, '{"event": "done", "status": "interrupted", "time": "2026-01-01T12:00:00+00:00"}\n')  # before --resume
    parts = iter([step_line(5) + "\n", "", step_line(8) + '\n{"event": "done", "status": "done", "message": "all"}\n'])
    stream = io.StringIO()

    def go_on() -> None:
        if (part := next(parts, None)) is not None:
            add(path, part)
        else:
            kill(path)  # the coordinator ends after its last event

    with open_display(stream, title="t", report_every=1, environ={}) as display:
        show_to_the_end(LocalRun(path, wait=go_on), display)
    told = [line.partition("  ")[2] for line in stream.getvalue().splitlines()]
    assert told[-1] == "all"
    assert "saved checkpoints/step-4, the best so far" in told
    assert next(parts, None) is None


def test_what_is_no_run_is_refused_with_the_way_to_find_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run: mlxdist runs FOLDER"):
        shown(str(tmp_path))
    with pytest.raises(UserError, match="the run's folder on mini-1 is missing"):
        shown("mini-1:")


def test_a_run_is_named_by_its_folder_or_by_its_run_file(tmp_path: Path) -> None:
    path = make_run(tmp_path / "runs" / "mine")
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "run.toml").write_text('model = "org/tiny"\ndata = "rows.jsonl"\noutput = "runs/mine"\n')
    for name in (path, tmp_path / "run.toml"):
        with run_named(str(name), None, repeat=False) as run:
            assert run.name == "mine"
