"""The real libraries, without a network: the same run, the same names and every value, over two sessions."""

from pathlib import Path

import pytest

from tests.coordinator.loggers.logged_runs import ToldRun
from tests.coordinator.loggers.written_files import tensorboard_rows, tensorboard_text, trackio_rows, wandb_runs

NAMES = ("train/loss", "train/learning_rate", "train/grad_norm", "train/rewards/chosen", "eval/loss", "eval/runtime")


@pytest.mark.slow
def test_each_library_has_every_value_of_a_run_and_of_the_run_that_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    pytest.importorskip("wandb")
    pytest.importorskip("trackio")
    run = ToldRun(tmp_path / "run")
    names = ("tensorboard", "wandb", "trackio")
    home = tmp_path / "home"
    home.mkdir()
    environ = {
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HOME": str(home),
        "HTTPS_PROXY": "http://127.0.0.1:9",  # a library that asks the network gets no answer
    }
    loggers = run.loggers(*names, **environ)
    run.steps(loggers, 1, 3)
    assert run.end(loggers, "interrupted") == []
    loggers = run.loggers(*names, **environ)
    run.steps(loggers, 4, 5)
    assert run.end(loggers) == []

    rows = tensorboard_rows(run.folder.path / "tensorboard")
    assert set(NAMES) <= {name for name, _, _ in rows}
    assert [(step, round(value, 4)) for name, step, value in rows if name == "train/loss"] == [
        *((1, 1.0), (2, 0.5), (3, 0.3333), (4, 0.25), (5, 0.2))
    ]
    written = tensorboard_text(run.folder.path / "tensorboard")
    assert b"train.learning_rate" in written
    assert b"secret" not in written

    (first, settings, before), (second, _, after) = wandb_runs(run.folder.path / "wandb")
    assert first == second
    assert settings["train.learning_rate"] == 2e-4
    assert "secret" not in str(settings)
    losses = [(row["train/global_step"], row["train/loss"]) for row in (*before, *after) if "train/loss" in row]
    assert losses == [(step, 1 / step) for step in range(1, 6)]
    evaluations = [(row["train/global_step"], row["eval/loss"]) for row in (*before, *after) if "eval/loss" in row]
    assert evaluations == [(3, 0.25), (5, 0.25)]

    runs, rows = trackio_rows(tmp_path / "trackio")
    assert len(runs) == 1
    assert [(step, value) for name, step, value in rows if name == "train/loss"] == [(s, 1 / s) for s in range(1, 6)]
    assert {(name, step) for name, step, _ in rows} >= {("eval/rewards/margins", 3), ("eval/rewards/margins", 5)}


@pytest.mark.slow
def test_without_a_login_weights_and_biases_asks_nothing_and_is_told_once(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run = ToldRun(tmp_path / "run")
    (tmp_path / "home").mkdir()
    environ = {"HOME": str(tmp_path / "home"), "WANDB_MODE": "online", "WANDB_API_KEY": "", "NETRC": "/dev/null"}
    loggers = run.loggers("wandb", **environ)
    run.steps(loggers, 1, 3)
    (said,) = run.end(loggers)
    assert "wandb: UsageError" in said
    assert "wandb login" in said
    assert "The run goes on without it" in said
