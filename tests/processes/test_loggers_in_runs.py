"""Whole runs with loggers and notifications: the same bits, and a run that ends whatever they do."""

import json
import os
from pathlib import Path

import pytest

import mlxdist
from scripts.local_cluster import adapter_sha
from tests.coordinator.loggers.fake_libraries import misbehaving
from tests.coordinator.loggers.written_files import tensorboard_rows
from tests.coordinator.notify.receivers import receiver, silent_receiver
from tests.processes.test_python import settings


@pytest.mark.slow
def test_loggers_and_notifications_change_no_bit_and_a_resumed_run_goes_on_in_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "plain").mkdir()
    mlxdist.train(settings(model, tmp_path / "plain"), progress=False)
    with receiver() as server:
        (tmp_path / "logged").mkdir()
        told = settings(model, tmp_path / "logged", report_to=["tensorboard"], notify=f"{server.url}/${{WORD}}")
        monkeypatch.setenv("WORD", "s3cret")
        stop = mlxdist.Stop()
        first = mlxdist.train(told, progress=False, on_checkpoint=lambda event: stop.request(), stop=stop)
        assert (first.status, first.steps) == ("interrupted", 2)
        mlxdist.train(told, progress=False, resume=True)
    assert adapter_sha(tmp_path / "logged" / "run") == adapter_sha(tmp_path / "plain" / "run")

    run = tmp_path / "logged" / "run"
    rows = tensorboard_rows(run / "tensorboard")
    losses = {step: value for name, step, value in rows if name == "train/loss"}
    told_losses = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert losses == pytest.approx({event["step"]: event["loss"] for event in told_losses if event["event"] == "train"})
    assert len([name for name, _, _ in rows if name == "train/loss"]) == 4
    assert [json.loads(body)["event"] for *_, body in server.requests][:2] == ["best", "interrupted"]
    assert json.loads(server.requests[-1][-1])["event"] == "done"
    files = [path for path in run.rglob("*") if path.is_file() and path.suffix in (".json", ".jsonl", ".log", "")]
    assert [path for path in files if b"s3cret" in path.read_bytes()] == []


@pytest.mark.slow
def test_a_run_ends_as_ever_when_its_logger_ends_the_process_and_its_receiver_never_answers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    library = misbehaving(tmp_path / "library", "print('LOUD', flush=True) or where == 'log' and os._exit(9)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(library), os.environ.get("PYTHONPATH", "")]))
    with silent_receiver() as url:
        result = mlxdist.train(settings(model, tmp_path, report_to=["tensorboard"], notify=f"{url}/s3cret"))
    assert (result.status, result.steps) == ("done", 4)
    shown = " ".join(capfd.readouterr().out.split())
    assert "tensorboard: it ended with exit code 9. The run goes on without it" in shown
    assert "notify: a message to 127.0.0.1 was not sent: it did not answer within 5 s" in shown
    assert "LOUD" not in shown
    assert "s3cret" not in shown
    assert "all 4 steps are done" in shown
