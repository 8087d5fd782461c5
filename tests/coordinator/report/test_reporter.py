"""The events of a run: each told once, in a file that any JSON reader takes, over all sessions of the run."""

import json
import math
import re
import resource
import signal
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from mlxdist.coordinator.cluster.events import NodeNews
from mlxdist.coordinator.report.format import StepReport
from mlxdist.coordinator.report.history import BestVal, read_history, trim_metrics
from mlxdist.coordinator.report.reporter import Reporter
from mlxdist.coordinator.report.summary import Results
from mlxdist.coordinator.storage.run_folder import RunFolder, append
from mlxdist.protocol.errors import SaveError
from mlxdist.protocol.tree import Span

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


class Heard:
    """A display that remembers what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.recalled: list[str] = []

    def stage(self, message: str, progress: float | None) -> None:
        self.calls.append(("stage", message, progress))

    def take(self, event: Mapping[str, Any]) -> None:
        match event:
            case {"event": "train", "step": step}:
                self.calls.append(("step", step))
            case {"event": "val", "step": step, "loss": loss}:
                self.calls.append(("val", step, loss))
            case {"event": "node", "name": name, "state": state, "message": message, "stays": stays}:
                self.calls.append(("node", name, state, message, stays))
            case {"paused": paused, "message": message}:
                self.calls.append(("pause", message, not paused))
            case {"note": True, "message": message} | {"event": "checkpoint" | "promise", "message": message}:
                self.calls.append(("say", message))

    def recall(self, events: Iterable[Mapping[str, Any]], now: float | None = None, shown: int = 0) -> None:
        self.recalled = [event["event"] for event in events]

    def say(self, sentence: str) -> None:
        self.calls.append(("say", sentence))

    def end(self, sentence: str) -> None:
        self.calls.append(("end", sentence))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def heard() -> Heard:
    return Heard()


def reporter(run: RunFolder, heard: Heard, clock: FakeClock) -> Reporter:
    return Reporter(run, heard, clock=clock, now=lambda: NOON)


def step(number: int, loss: float = 2.0, total: int | None = 4, **more: Any) -> StepReport:
    """80 of 200 tokens are supervised, in 2 s; `more` are fields of the report, or further metrics."""
    fields = {name: more.pop(name) for name in ("peak_gb", "leaves_recomputed", "advice", "seconds") if name in more}
    return StepReport(number, total, {"loss": loss, **more}, 1.5, 2e-4, 80, 200, fields.pop("seconds", 2.0), **fields)


def events(run: RunFolder) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in run.metrics_jsonl.read_text().splitlines()]


def live_through(run: RunFolder, report: Reporter, clock: FakeClock, numbers: range) -> None:
    """Steps, each with an evaluation and a checkpoint; the losses are 10 / step, so that each is the best so far."""
    for number in numbers:
        clock.seconds += 2
        report.step(step(number, 10 / number, peak_gb=1.0 + number))
        report.val(number, 10 / number, {"rewards/accuracies": 0.5}, 0.5)
        report.checkpoint(number, run.checkpoints / f"step-{number:05d}", best=True)


def close(report: Reporter, run: RunFolder, message: str = "All steps are done.") -> dict[str, Any]:
    checkpoints = [run.checkpoints / "step-00003", run.checkpoints / "step-00004"]
    report.write_summary("done", Results({"model": "m"}, {"model.layers.0.mlp.up_proj": 8}, checkpoints))
    report.done(message, "done")
    summary: dict[str, Any] = json.loads(run.metrics_json.read_text())
    return summary


def test_a_step_is_one_line_with_trls_names_and_what_a_person_reads(
    run: RunFolder, heard: Heard, clock: FakeClock
) -> None:
    report = reporter(run, heard, clock)
    clock.seconds += 2
    report.step(step(1, peak_gb=1.25, **{"rewards/margins": 0.25, "rewards/accuracies": 0.5}))
    assert events(run) == [
        {
            "event": "train",
            "time": "2026-03-01T12:00:00+00:00",
            "wall_seconds": 2.0,
            "step": 1,
            "total_steps": 4,
            "progress": 0.25,
            "message": "step 1 of 4: loss 2.0000, rewards/accuracies 0.50, 40 tokens/s, 2.0 s a step",
            "loss": 2.0,
            "grad_norm": 1.5,
            "learning_rate": 2e-4,
            "tokens": 80,
            "tokens_per_second": 40.0,
            "all_tokens_per_second": 100.0,
            "seconds": 2.0,
            "elapsed_seconds": 0.0,
            "disturbed": False,
            "leaves_recomputed": 0,
            "seconds_paused": 0.0,
            "peak_gb": 1.25,
            "rewards/margins": 0.25,
            "rewards/accuracies": 0.5,
        }
    ]
    assert heard.calls == [("step", 1)]


def test_the_advice_of_a_step_is_said_and_written_behind_it(run: RunFolder, heard: Heard, clock: FakeClock) -> None:
    reporter(run, heard, clock).step(step(1, advice="Lower train.learning_rate."))
    assert heard.calls == [("step", 1), ("say", "Lower train.learning_rate.")]
    assert [event["event"] for event in events(run)] == ["train", "stage"]


def test_every_event_has_its_line_and_reaches_the_display(run: RunFolder, heard: Heard, clock: FakeClock) -> None:
    report = reporter(run, heard, clock)
    report.note("2 rows will be cut.")
    report.stage("loading the model")
    report.node(NodeNews("mini-1", "ready", ""))
    live_through(run, report, clock, range(1, 2))
    close(report, run)
    assert [event["event"] for event in events(run)] == ["stage", "stage", "node", "train", "val", "checkpoint", "done"]
    assert [call[0] for call in heard.calls] == [
        "say",
        "stage",
        "node",
        "step",
        "val",
        "say",
        "say",
        "end",
    ]


def test_numbers_that_are_not_finite_are_null(run: RunFolder, heard: Heard, clock: FakeClock) -> None:
    report = reporter(run, heard, clock)
    report.step(step(1, math.nan, kl=math.inf))
    report.val(1, math.nan, {"rewards/margins": -math.inf}, 1.0)
    train, val = events(run)
    assert (train["loss"], train["kl"], val["loss"], val["metrics"]) == (None, None, None, {"rewards/margins": None})
    assert close(report, run)["final_val_loss"] is None


def test_a_node_is_told_when_it_changes_and_not_before(run: RunFolder, heard: Heard, clock: FakeClock) -> None:
    report = reporter(run, heard, clock)
    for state in ("ready", "ready", "busy", "busy", "ready"):
        report.node(NodeNews("mini-1", state, ""))
    assert [event["state"] for event in events(run)] == ["ready", "busy", "ready"]


def test_a_loss_is_one_line_with_its_cause_and_what_was_done_and_so_is_the_return(
    run: RunFolder, heard: Heard, clock: FakeClock
) -> None:
    report = reporter(run, heard, clock)
    report.node(NodeNews("b", "busy", ""))
    lost = NodeNews("b", "dead", "not heard for 15 s", action="2 leaves go to others", leaves=(Span(3, 5),))
    for news in (lost, lost, NodeNews("b", "loading", "loading the model"), NodeNews("b", "ready", "")):
        report.node(news)
    assert [{key: event[key] for key in ("state", "cause", "action", "leaves")} for event in events(run)] == [
        {"state": "busy", "cause": "", "action": "", "leaves": []},
        {"state": "dead", "cause": "not heard for 15 s", "action": "2 leaves go to others", "leaves": [[3, 5]]},
        {"state": "loading", "cause": "loading the model", "action": "", "leaves": []},
        {"state": "ready", "cause": "", "action": "", "leaves": []},
    ]
    assert [call[1:4] for call in heard.calls if call[-1]] == [
        ("b", "dead", "not heard for 15 s; 2 leaves go to others"),
        ("b", "ready", ""),
    ]


def test_a_killed_worker_is_told_as_a_loss_although_its_node_only_connects_again(
    run: RunFolder, heard: Heard, clock: FakeClock
) -> None:
    report = reporter(run, heard, clock)
    for state, cause in [("connecting", "connected"), ("ready", ""), ("connecting", "the worker was killed")]:
        report.node(NodeNews("b", state, cause))
    assert [call[-1] for call in heard.calls] == [False, False, True]


def test_small_trouble_of_a_node_is_told_ever_more_seldom_and_written_always(
    run: RunFolder, heard: Heard, clock: FakeClock
) -> None:
    report = reporter(run, heard, clock)
    report.node(NodeNews("slow", "busy", ""))
    for number in range(1000):  # one every ten seconds
        report.node(NodeNews("slow", "busy", f"leaves [{number}, 9) take long there", action="b computes them too"))
        clock.seconds += 10
    assert len(events(run)) == 1001
    told = [at for at, call in enumerate(heard.calls[1:]) if call[-1]]
    assert told == [0, 6, 18, 42, 90, 186, 378, 738]


def test_a_node_that_flaps_is_told_ever_more_seldom_but_a_loss_always(
    run: RunFolder, heard: Heard, clock: FakeClock
) -> None:
    report = reporter(run, heard, clock)
    for _ in range(3):
        for state, cause in [("ready", ""), ("suspect", "no heartbeat for 6 s"), ("ready", "heard again")]:
            report.node(NodeNews("flaps", state, cause))
            clock.seconds += 1
    report.node(NodeNews("flaps", "dead", "not heard for 15 s"))
    report.node(NodeNews("flaps", "ready", ""))
    assert [call[2] for call in heard.calls if call[-1]] == ["suspect", "ready", "dead", "ready"]


def test_a_pause_is_said_at_both_ends_and_its_seconds_are_lost(run: RunFolder, heard: Heard, clock: FakeClock) -> None:
    report = reporter(run, heard, clock)
    report.step(step(1))
    report.paused(NodeNews("", "paused", "paused: 0 of at least 1 nodes can work", action="waiting for more"))
    report.paused(NodeNews("", "training", "going on after 30 s: 1 of at least 1 nodes can work", seconds=30.0))
    clock.seconds += 40
    report.step(step(2, seconds=34.0))  # twice 2 s: the rest of the step is lost
    assert [call for call in heard.calls if call[0] == "pause"] == [
        ("pause", "paused: 0 of at least 1 nodes can work; waiting for more", False),
        ("pause", "going on after 30 s: 1 of at least 1 nodes can work", True),
    ]
    assert [(event["paused"], event.get("seconds")) for event in events(run) if event["event"] == "stage"] == [
        (True, None),
        (False, 30.0),
    ]
    summary = close(report, run)["losses"]
    assert (summary["seconds_paused"], summary["seconds_lost"], summary["useful_seconds"]) == (30.0, 32.0, 4.0)
    assert summary["goodput"] == 0.1
    assert [call[1] for call in heard.calls if call[0] == "say"] == [
        "10 % of the time went into useful steps (goodput); 0 leaves recomputed, 32 s lost, 30 s of it paused"
    ]


def test_a_pause_within_an_evaluation_is_lost_but_no_step_is_blamed(
    run: RunFolder, heard: Heard, clock: FakeClock
) -> None:
    report = reporter(run, heard, clock)
    report.step(step(1))
    report.paused(NodeNews("", "training", "going on after 30 s", seconds=30.0))
    report.val(1, 2.0, {}, 31.0)
    report.step(step(2))
    first = close(report, run)["losses"]
    assert [event["disturbed"] for event in events(run) if event["event"] == "train"] == [False, False]
    assert (first["seconds_paused"], first["seconds_lost"], first["useful_seconds"]) == (30.0, 30.0, 4.0)
    again = reporter(run, heard, clock)
    again.resume_after(2)
    assert close(again, run)["losses"]["seconds_lost"] == 30.0


def test_losses_outlive_a_crash_of_the_coordinator(run: RunFolder, heard: Heard, clock: FakeClock) -> None:
    for saved in (0, 1):  # each session takes two steps, the second of which is not saved
        report = reporter(run, heard, clock)
        report.resume_after(saved)
        clock.seconds += 5
        for number, so_far in ((saved + 1, 3), (saved + 2, 6)):
            report.step(step(number, leaves_recomputed=so_far))
    last = reporter(run, heard, clock)
    last.resume_after(2)
    losses = close(last, run)["losses"]
    assert (losses["leaves_recomputed"], losses["steps_again"]) == (3 + 3 + 3 + 3, 2)
    assert [event["message"] for event in events(run) if event["event"] == "stage"] == [
        "going on after step 1; 1 step that was not saved is done again",
        "going on after step 2; 1 step that was not saved is done again",
    ]


def test_a_stage_that_tells_every_row_does_not_fill_the_file(run: RunFolder, heard: Heard, clock: FakeClock) -> None:
    report = reporter(run, heard, clock)
    for row in range(1001):
        report.stage("tokenizing", row / 1000)
    assert len(events(run)) <= 21
    assert [events(run)[0]["progress"], events(run)[-1]["progress"]] == [0.0, 1.0]
    assert len(heard.calls) == 1001


def test_the_cause_of_a_failure_is_in_the_file_and_is_left_to_the_command_on_the_terminal(
    run: RunFolder, heard: Heard, clock: FakeClock
) -> None:
    reporter(run, heard, clock).done("The gradient is not finite.", "failed", "the run failed")
    assert (events(run)[-1]["status"], events(run)[-1]["message"]) == ("failed", "The gradient is not finite.")
    assert heard.calls == [("end", "the run failed")]


def test_the_summary_tells_the_whole_run(run: RunFolder, heard: Heard, clock: FakeClock) -> None:
    report = reporter(run, heard, clock)
    live_through(run, report, clock, range(1, 5))
    clock.seconds += 1
    assert close(report, run) == {
        "status": "done",
        "steps": 4,
        "wall_seconds": 9.0,
        "peak_gb": 5.0,
        "losses": {
            "leaves_recomputed": 0,
            "steps_disturbed": 0,
            "steps_again": 0,
            "seconds_paused": 0.0,
            "seconds_lost": 0.0,
            "useful_seconds": 8.0,
            "goodput": 0.889,
        },
        "final_train_loss": 2.5,
        "final_val_loss": 2.5,
        "best_val": {"step": 4, "loss": 2.5, "checkpoint": "checkpoints/step-00004"},
        "val_trajectory": [{"step": n, "loss": 10 / n, "rewards/accuracies": 0.5} for n in range(1, 5)],
        "train_losses": [10 / n for n in range(1, 5)],
        "applied_ranks": {"model.layers.0.mlp.up_proj": 8},
        "checkpoints": ["checkpoints/step-00003", "checkpoints/step-00004"],
        "config": {"model": "m"},
    }


def test_a_run_that_ends_before_its_first_step_has_a_summary_too(
    run: RunFolder, heard: Heard, clock: FakeClock
) -> None:
    summary = close(reporter(run, heard, clock), run)
    assert (summary["final_train_loss"], summary["best_val"], summary["train_losses"]) == (None, None, [])


@pytest.mark.parametrize("last_saved", [0, 1, 2, 3])
def test_a_resumed_run_tells_every_step_once_and_sums_up_as_if_never_interrupted(
    run: RunFolder, heard: Heard, clock: FakeClock, last_saved: int
) -> None:
    first = reporter(run, heard, clock)
    live_through(run, first, clock, range(1, 4))
    close(first, run, "Interrupted; saved.")
    with run.metrics_jsonl.open("a") as torn:
        torn.write('{"event": "train", "ste\n')

    clock.seconds = 50_000.0  # a monotonic clock begins anywhere
    second = reporter(run, heard, clock)
    second.stage("loading the model")
    clock.seconds += 1
    second.resume_after(last_saved)
    live_through(run, second, clock, range(last_saved + 1, 5))
    summary = close(second, run)

    assert heard.recalled == ["train", "val", "checkpoint"] * last_saved + ["stage"]

    told = [(event["event"], event["step"]) for event in events(run) if event["event"] != "stage"]
    assert told == [(kind, n) for n in range(1, 5) for kind in ("train", "val", "checkpoint")] + [("done", 4)]
    assert summary["train_losses"] == [10 / n for n in range(1, 5)]
    assert [val["step"] for val in summary["val_trajectory"]] == [1, 2, 3, 4]
    assert (summary["wall_seconds"], summary["peak_gb"]) == (6.0 + 1.0 + 2.0 * (4 - last_saved), 5.0)
    again = 3 - last_saved
    assert (summary["losses"]["steps_again"], summary["losses"]["seconds_lost"]) == (again, 2.0 * again)
    assert summary["losses"]["useful_seconds"] == 8.0


def test_trimming_keeps_what_happened_apart_from_steps(run: RunFolder, heard: Heard, clock: FakeClock) -> None:
    report = reporter(run, heard, clock)
    report.stage("loading")
    report.step(step(1))
    report.node(NodeNews("mini-1", "dead", "no heartbeat for 15 s"))
    report.step(step(2))
    before = run.metrics_jsonl.read_text().splitlines()
    trim_metrics(run.metrics_jsonl, 1)
    assert run.metrics_jsonl.read_text().splitlines() == before[:3]
    trim_metrics(run.path / "missing.jsonl", 1)


def test_the_history_remembers_the_best_evaluation(run: RunFolder, heard: Heard, clock: FakeClock) -> None:
    report = reporter(run, heard, clock)
    live_through(run, report, clock, range(1, 3))
    report.val(3, 99.0, {}, 1.0)
    report.checkpoint(3, run.checkpoints / "step-00003", best=False)
    assert read_history(run.metrics_jsonl).best == BestVal(2, 5.0, "checkpoints/step-00002")
    assert close(report, run)["best_val"]["step"] == 2


def test_an_event_file_that_cannot_be_written_is_said(run: RunFolder, heard: Heard, clock: FakeClock) -> None:
    run.metrics_jsonl.mkdir()
    report = reporter(run, heard, clock)
    live_through(run, report, clock, range(1, 4))
    said = [call[1] for call in heard.calls if call[0] == "say" and "Could not write" in call[1]]
    assert len(said) == 1
    assert re.fullmatch(r"Could not write .*metrics\.jsonl: .*\. The run goes on, and .*: check the disk\.", said[0])
    with pytest.raises(SaveError, match=r"metrics\.jsonl"):
        close(report, run)


def test_events_that_had_to_wait_are_written_in_their_order_none_missing_and_none_twice(
    run: RunFolder, heard: Heard, clock: FakeClock
) -> None:
    report = reporter(run, heard, clock)
    live_through(run, report, clock, range(1, 3))
    told = run.metrics_jsonl.rename(run.path / "told")
    run.metrics_jsonl.mkdir()
    live_through(run, report, clock, range(3, 5))
    run.metrics_jsonl.rmdir()
    told.rename(run.metrics_jsonl)
    live_through(run, report, clock, range(5, 7))
    events = [json.loads(line) for line in run.metrics_jsonl.read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert heard.calls.count(("say", "writing works again")) == 1


def test_an_event_is_appended_whole_or_not_at_all(run: RunFolder) -> None:
    """The file may not grow past 100 bytes, as on a disk with little room."""
    run.metrics_jsonl.write_bytes(b"a" * 89 + b"\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(SaveError):
            append(run.metrics_jsonl, b"b" * 20 + b"\n")
        append(run.metrics_jsonl, b"c" * 9 + b"\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert run.metrics_jsonl.read_bytes() == b"a" * 89 + b"\n" + b"c" * 9 + b"\n"
