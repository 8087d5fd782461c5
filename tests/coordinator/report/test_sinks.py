"""Loggers and notifications hear every event, end before the run's last word, and end once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxdist.coordinator.config.hosts import local_hosts
from mlxdist.coordinator.config.load import configured
from mlxdist.coordinator.report.history import read_history
from mlxdist.coordinator.report.reporter import Reporter
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.protocol.errors import ConfigError


class Heard:
    """A display that remembers the sentences."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def say(self, sentence: str) -> None:
        self.sentences.append(sentence)

    end = say

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class Talking:
    """A sink with a sentence for one event, and one at its end."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def take(self, event: Mapping[str, object]) -> Sequence[str]:
        self.heard.append(event["event"])
        return ["it failed"] if event.get("message") == "training" or event["event"] == "done" else []

    def end(self, failure: str = "") -> Sequence[str]:
        self.heard.append(("end", failure))
        return ["not finished"]


def reporter(folder: Path) -> tuple[Reporter, Heard, Talking]:
    display, sink = Heard(), Talking()
    report = Reporter(RunFolder(folder), display, clock=lambda: 0.0, sinks=[sink])  # type: ignore[arg-type]
    return report, display, sink


def test_a_sink_hears_each_event_and_its_sentence_is_told_as_a_note(tmp_path: Path) -> None:
    report, _, sink = reporter(tmp_path)
    report.stage("reading")
    report.stage("training")
    assert sink.heard == ["stage", "stage", "stage"]  # the last one is its own sentence
    assert "it failed" in (tmp_path / "metrics.jsonl").read_text()


def test_sinks_end_before_the_last_word_and_no_event_comes_after_the_end(tmp_path: Path) -> None:
    report, display, sink = reporter(tmp_path)
    report.done("all steps are done", "done")
    assert sink.heard == ["done", ("end", "")]
    assert display.sentences == ["it failed", "not finished", "all steps are done"]
    assert read_history(tmp_path / "metrics.jsonl").status == "done"
    report.close("too late")
    assert sink.heard == ["done", ("end", "")]


def test_a_run_that_breaks_off_ends_its_sinks_with_the_reason(tmp_path: Path) -> None:
    report, display, sink = reporter(tmp_path)
    report.close("too few nodes")
    assert sink.heard == [("end", "too few nodes")]
    assert display.sentences == ["not finished"]


def test_an_address_that_cannot_be_used_ends_a_run_before_anything_is_done(tmp_path: Path) -> None:
    from mlxdist.coordinator.run import run

    (tmp_path / "rows.jsonl").write_text('{"text": "w1"}\n')
    settings = {"model": "org/tiny", "data": str(tmp_path / "rows.jsonl"), "output": str(tmp_path / "run")}
    for address, words in (("https://ntfy.sh/${TOPIC}", "reads TOPIC"), ("ntfy.sh/s3cret", "must be an address")):
        config = configured({**settings, "train": {"notify": address}}, [])
        assert "s3cret" not in repr(config)
        with pytest.raises(ConfigError, match=words) as caught:
            run(config, local_hosts(1), resume=False, environ={})
        assert "s3cret" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_value_of_the_wrong_type_is_refused_without_being_shown(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "w1"}\n')
    settings = {"model": "org/tiny", "data": str(tmp_path / "rows.jsonl"), "train": {"notify": ["https://s3cret"]}}
    with pytest.raises(ConfigError, match=r"train\.notify must be text in quotes") as caught:
        configured(settings, [])
    assert "s3cret" not in str(caught.value)


def test_an_unknown_logger_is_refused_with_the_list(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "w1"}\n')
    settings = {"model": "org/tiny", "data": str(tmp_path / "rows.jsonl")}
    words = r'train\.report_to = .*: must be a list of "tensorboard", "wandb" or "trackio"'
    for value in (["mlflow"], "tensorboard", ["tensorboard", 1]):
        with pytest.raises(ConfigError, match=words):
            configured({**settings, "train": {"report_to": value}}, [])
    assert configured({**settings, "train": {"report_to": ["wandb"]}}, []).train.report_to == ("wandb",)
    with pytest.raises(ConfigError, match=r"report_to belongs in \[train\]"):
        configured({**settings, "report_to": ["wandb"]}, [])
