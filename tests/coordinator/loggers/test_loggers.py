"""A logger that fails, asks, prints or blocks holds neither a step nor the end of a run, and is told once."""

import importlib.util
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path

import psutil
import pytest

from mlxdist.coordinator.loggers.libraries import check_libraries
from mlxdist.coordinator.loggers.loggers import Loggers
from mlxdist.coordinator.loggers.scalars import scalars_of
from mlxdist.protocol.errors import UserError
from tests.coordinator.loggers.fake_libraries import misbehaving
from tests.coordinator.loggers.logged_runs import ToldRun, wait_for

FOREVER = "import threading; threading.Event().wait()"


def children_of_loggers() -> list[psutil.Process]:
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it may end at any moment
            if each.status() != psutil.STATUS_ZOMBIE and "mlxdist.coordinator.loggers.process" in each.cmdline():
                found.append(each)
    return found


def has_ended(number: int) -> bool:
    """A child of a process that was killed may stay a zombie where nothing takes it up."""
    try:
        return bool(psutil.Process(number).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def said_of(run: ToldRun, loggers: Loggers) -> list[str]:
    """All that the loggers have said up to now."""
    run.tell(loggers, "stage", message="a moment later")
    said, run.said = run.said, []
    return said


def test_the_names_are_those_that_the_callbacks_of_hugging_face_write() -> None:
    train = {"event": "train", "time": "2026-05-01T12:00:00+00:00", "step": 3, "loss": 1.5, "message": "…"}
    more = {"learning_rate": 1e-3, "grad_norm": 2.0, "rewards/chosen": 0.1, "logps/rejected": None, "disturbed": True}
    scalars = scalars_of({**train, **more, "progress": 0.5, "total_steps": 6, "wall_seconds": 9.0})
    assert scalars is not None
    assert scalars.values == {
        "train/loss": 1.5,
        "train/learning_rate": 1e-3,
        "train/grad_norm": 2.0,
        "train/rewards/chosen": 0.1,
    }
    assert (scalars.step, scalars.seconds) == (3, 1777636800.0)
    evaluation = scalars_of(
        {"event": "val", "step": 4, "loss": 2.0, "metrics": {"rewards/margins": 0.3}, "seconds": 7.0}
    )
    assert evaluation is not None
    assert evaluation.with_step == {
        "eval/loss": 2.0,
        "eval/rewards/margins": 0.3,
        "eval/runtime": 7.0,
        "train/global_step": 4,
    }
    assert scalars_of({"event": "node", "name": "a", "state": "dead"}) is None


def test_a_library_that_is_missing_is_told_before_the_run_with_the_command_to_type(tmp_path: Path) -> None:
    def find(name: str) -> ModuleSpec | None:
        if name == "wandb":  # the folder that W&B leaves behind is found as a package without code
            return ModuleSpec("wandb", None, is_package=True)
        return importlib.util.find_spec("json") if name == "trackio" else None

    check_libraries(["trackio"], find)
    check_libraries([])
    with pytest.raises(
        UserError, match=r"tensorboard and wandb, .* pip install tensorboardX wandb .*\[tensorboard,wandb\]"
    ):
        check_libraries(["tensorboard", "wandb", "trackio"], find)


def test_a_logger_gets_every_step_and_evaluation_once_over_all_sessions(tmp_path: Path) -> None:
    run, library = ToldRun(tmp_path / "run"), misbehaving(tmp_path / "library")
    loggers = run.loggers("tensorboard", library=library)
    run.steps(loggers, 1, 3)
    assert run.end(loggers, "interrupted") == []
    loggers = run.loggers("tensorboard", library=library)
    run.steps(loggers, 3, 5)  # step 3 was not saved, and is done again
    assert run.end(loggers) == []
    logged = [(name, step) for where, *rest in run.heard() if where == "log" for name, _, step in [rest]]
    assert [step for name, step in logged if name == "train/loss"] == [1, 2, 3, 4, 5]
    assert [step for name, step in logged if name == "eval/loss"] == [3, 5]
    assert [where for where, *_ in run.heard() if where != "log"] == ["open", "close", "open", "close"]
    assert children_of_loggers() == []


def test_what_a_logger_prints_goes_into_its_own_log_and_it_has_no_input(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    library = misbehaving(tmp_path / "library", "print('LOUD'); sys.stderr.write('LOUDER'); os.write(1, b'LOUDEST')")
    run = ToldRun(tmp_path / "run")
    loggers = run.loggers("tensorboard", library=library)
    run.steps(loggers, 1, 2)
    assert run.end(loggers) == []
    assert capfd.readouterr() == ("", "")
    log = (run.folder.logs / "tensorboard.log").read_text()
    assert all(word in log for word in ("LOUD\n", "LOUDER", "LOUDEST"))

    asking = ToldRun(tmp_path / "asking")
    loggers = asking.loggers("tensorboard", library=misbehaving(tmp_path / "asks", "input('login? ')"))
    asking.steps(loggers, 1, 2)
    (said,) = asking.end(loggers)
    assert "EOFError" in said
    assert "The run goes on without it" in said


@pytest.mark.parametrize(
    ("deed", "reason"),
    [
        ("raise RuntimeError('no\\nkey')", "tensorboard: RuntimeError: no key. The run goes on without it"),
        ("os._exit(7)", "tensorboard: it ended with exit code 7. The run goes on without it"),
        ("os.kill(os.getpid(), 11)", "tensorboard: signal 11 ended it. The run goes on without it"),
        ("where == 'close' and sys.exit('late')", "tensorboard: it ended with exit code 1. The run goes on without it"),
        ("where == 'log' and sys.exit('early')", "tensorboard: it ended with exit code 1. The run goes on without it"),
    ],
)
def test_a_logger_that_fails_is_told_once_and_touches_nothing_else(tmp_path: Path, deed: str, reason: str) -> None:
    run = ToldRun(tmp_path / "run")
    loggers = run.loggers("tensorboard", library=misbehaving(tmp_path / "library", deed))
    run.steps(loggers, 1, 2)
    if "close" not in deed:
        wait_for(lambda: not children_of_loggers())
        run.steps(loggers, 3, 4)
    (said,) = run.end(loggers)
    assert said.startswith(reason)
    assert said.endswith(str(run.folder.logs / "tensorboard.log"))


def test_what_a_logger_has_started_ends_with_it(tmp_path: Path) -> None:
    started = tmp_path / "started"
    child = f"open({str(started)!r}, 'w').write(str(__import__('subprocess').Popen(['sleep', '1000']).pid))"
    run = ToldRun(tmp_path / "run")
    loggers = run.loggers("tensorboard", library=misbehaving(tmp_path / "library", f"{child}; os._exit(7)"))
    run.steps(loggers, 1, 2)
    wait_for(lambda: bool(said_of(run, loggers)))
    number = int(started.read_text())
    wait_for(lambda: has_ended(number))
    assert run.end(loggers) == []


@pytest.mark.slow
@pytest.mark.parametrize("where", ["open", "log", "close"])
def test_a_logger_that_blocks_for_ever_is_ended_after_its_time_with_all_that_it_started(
    tmp_path: Path, where: str
) -> None:
    """A child of the library's own, which would outlive it, is ended too."""
    child = "__import__('subprocess').Popen(['sleep', '1000'])"
    deed = f"where == {where!r} and ({child}, __import__('threading').Event().wait())"
    run = ToldRun(tmp_path / "run")
    loggers = run.loggers("tensorboard", library=misbehaving(tmp_path / "library", deed), seconds=0.2)
    run.steps(loggers, 1, 2)
    if where != "close":
        wait_for(lambda: [where] == [call[0] for call in run.heard() if call[0] == where][:1])
        process = children_of_loggers()[0]
        wait_for(lambda: bool(process.children()))
    started = [each.pid for each in psutil.Process().children(recursive=True)]
    (said,) = run.end(loggers)
    assert "tensorboard had not finished 0.2 s after the end of the run, and was stopped" in said
    assert "the steps up to 0 of 2" in said or where == "close"
    wait_for(lambda: all(map(has_ended, started)))


def test_a_logger_whose_coordinator_is_gone_ends_by_itself(tmp_path: Path) -> None:
    """Its descriptor is all that it needs: no word is sent when a coordinator is killed."""
    run = ToldRun(tmp_path / "run")
    loggers = run.loggers("tensorboard", library=misbehaving(tmp_path / "library"))
    run.steps(loggers, 1, 2)
    wait_for(lambda: bool(run.heard()))
    assert loggers.end() == []  # without the event "done"
    assert run.heard()[-1] == ["close"]


def test_a_logger_that_cannot_be_started_is_told_and_the_others_log(tmp_path: Path) -> None:
    run, library = ToldRun(tmp_path / "run"), misbehaving(tmp_path / "library")
    run.folder.logs.write_text("a file in the place of the folder")
    loggers = run.loggers("tensorboard", library=library)
    run.steps(loggers, 1, 2)
    (said,) = run.end(loggers)
    assert "tensorboard could not be started" in said
    assert "the run goes on without it" in said


def test_no_logger_starts_for_a_session_without_a_step(tmp_path: Path) -> None:
    run = ToldRun(tmp_path / "run")
    loggers = run.loggers("tensorboard", library=misbehaving(tmp_path / "library"))
    run.tell(loggers, "stage", message="the run had come to its end")
    assert run.end(loggers) == []
    assert run.heard() == []
    assert not run.folder.logs.exists()
