"""A run on another host: the script that looks at it, by /bin/sh on this machine, and outputs of Linux and macOS."""

import io
import json
import os
import platform
import subprocess
from pathlib import Path

import pytest

from mlxdist.coordinator.launch.quoting import remote_command
from mlxdist.coordinator.launch.ssh import Target
from mlxdist.coordinator.report.display import open_display
from mlxdist.coordinator.status.remote import MOST_BYTES, RemoteRun, facts_in, look_script
from mlxdist.coordinator.status.show import facts_of
from mlxdist.coordinator.status.watch import show_to_the_end
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.protocol.errors import UserError
from tests.coordinator.overview.told_runs import make_run
from tests.coordinator.status.test_looks import add, kill, print_of, step_line, steps_in

HERE = Target("localhost")

# One line of the script each. macOS's: as its ps, stat and ls print these; not seen on a Mac.
LINUX = "look 1796134391 1796134100 mini mini 04:51 812345 0 0"
MACOS = "look 1796134391 1796134100 mini.local mini.local 04:51 12888642 0 0"
DAYS = "look 1796134391 1796040000 mini mini 1-02:13:11 812345 0 0"


@pytest.mark.parametrize("line", [LINUX, MACOS, DAYS])
def test_a_process_that_began_before_its_lock_was_written_holds_the_run(line: str) -> None:
    facts = facts_in(line)
    assert facts is not None
    assert (facts.held, facts.now) == (True, 1796134391.0)


@pytest.mark.parametrize(
    ("line", "held"),
    [
        (LINUX.replace("04:51", "-"), False),  # there is no such process
        (LINUX.replace("04:51", "00:07"), False),  # another program has its number by now
        (LINUX.replace("mini mini", "- mini"), True),  # of an older mlxdist, which wrote no host
        (LINUX.replace("mini mini", "other mini"), None),
        (LINUX.replace("04:51", "soon"), False),
    ],
)
def test_a_run_whose_process_is_gone_or_elsewhere_is_told_apart(line: str, held: bool | None) -> None:
    facts = facts_in(line)
    assert facts is not None
    assert facts.held is held


@pytest.mark.parametrize("line", ["", ".", "look", "look 1 2 3", LINUX + " 7", "Welcome to mini-1"])
def test_a_line_that_is_none_of_facts_is_passed_over(line: str) -> None:
    assert facts_in(line) is None


@pytest.mark.parametrize("folder", ["/a b/it's!", "~/mlxdist/runs/x", "runs/x"])
@pytest.mark.parametrize("owner", ["", "~/mlxdist/runs/x/pid"])
def test_the_script_is_short_enough_for_every_shell(folder: str, owner: str) -> None:
    for repeat in (True, False):
        remote_command(look_script(folder, owner, repeat=repeat), "mlxdist-" + 24 * "0")


def test_one_look_shows_a_run_as_a_local_look_does_and_touches_nothing(tmp_path: Path) -> None:
    path = make_run(tmp_path / "it's a run", ending=None)
    before = print_of(path)
    with RemoteRun(HERE, str(path), repeat=False) as run:
        facts = facts_of(run)
    assert run.name == "localhost:it's a run"
    assert (facts["state"], facts["step"], facts["best_validation"]) == ("training", 4, {"step": 4, "loss": 1.0})
    assert print_of(path) == before
    kill(path)
    with RemoteRun(HERE, str(path), repeat=False) as run:
        assert facts_of(run)["state"] == "stopped"
    (RunFolder(path).state / "lock").write_text(f"{os.getpid()} not-{platform.node()}\n")
    with RemoteRun(HERE, str(path), repeat=False) as run:
        assert facts_of(run)["state"] == "unknown"


def test_a_long_file_comes_in_parts(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", ending=None)
    count = 2 * MOST_BYTES // len(step_line(10_000)) + 5
    add(path, "".join(f"{step_line(number)}\n" for number in range(5, count)))
    with RemoteRun(HERE, str(path), repeat=False) as run:
        assert steps_in(run.look()) == [*range(1, count)]


def test_looks_go_on_with_what_is_new_and_begin_again_with_a_file_that_was_replaced(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", ending=None)
    with RemoteRun(HERE, str(path)) as run:
        assert steps_in(run.look()) == [1, 2, 3, 4]
        add(path, step_line(5) + "\n" + step_line(6)[:9])
        found: list[int] = []
        while 5 not in found:
            found += steps_in(run.look())
        add(path, step_line(6)[9:] + "\n")
        while 6 not in found:
            found += steps_in(run.look())
        assert found == [5, 6]
        (path / "aside").write_text("".join(f"{step_line(number)}\n" for number in range(1, 99)))  # a longer one
        (path / "aside").replace(RunFolder(path).metrics_jsonl)
        while not (look := run.look()).whole:
            assert steps_in(look) == []
        assert steps_in(look) == [*range(1, 99)]


def test_a_run_is_watched_until_it_tells_its_end_and_the_script_ends_with_the_watching(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", ending=None)
    stream = io.StringIO()
    with RemoteRun(HERE, str(path)) as run, open_display(stream, title="t", report_every=1, environ={}) as display:
        add(path, json.dumps({"event": "done", "status": "done", "message": "all"}) + "\n")
        kill(path)
        show_to_the_end(run, display)
    assert stream.getvalue().endswith("  all\n")
    assert run._process.returncode is not None


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    said = f"localhost: there is no run in {tmp_path}"
    with RemoteRun(HERE, str(tmp_path)) as run, pytest.raises(UserError, match=said):
        run.look()


def test_a_run_that_has_not_begun_is_waited_for_while_what_starts_it_is_there(tmp_path: Path) -> None:
    """As `launch` watches it on the coordinator's host: its process is noted before it has a folder."""
    with subprocess.Popen(["sleep", "600"]) as process:
        (tmp_path / "pid").write_text(f"{process.pid}\n")
        with RemoteRun(HERE, f"{tmp_path}/out", owner=f"{tmp_path}/pid") as run:
            first = run.look()
            assert (list(first.events), first.held) == ([], True)
            make_run(tmp_path / "out", ending=None)
            while not (steps := steps_in(run.look())):
                continue
            assert steps == [1, 2, 3, 4]
            process.kill()
            process.wait()
            while run.look().held:
                continue
