"""The reporter: events go to `metrics.jsonl` as they happen, to the person who watches, and into `metrics.json`.

Each line of `metrics.jsonl` is one JSON object with `event`, `time` (UTC), `wall_seconds` (of all sessions of the run)
and the event's own keys; `progress` is in [0, 1]; a number that is not finite is null.

    stage {message, progress?}     train {step, total_steps, progress, message, loss, grad_norm, …}
    checkpoint {step, path, best}  val {step, message, loss, metrics, seconds}
    done {status, step, message}   node {name, state, message, cause, action, leaves}
    promise {step, promise, reason, message}
    work {step, nodes: {name: {tokens_per_second, peak_gb, state, rows}}}

A stage with `note` is a sentence that a person should find again; so is a node's message with `stays`. The `rows` of
work say what the node did in the step, as cluster/timeline.py has them: [kind, begin, end, start, stop]. A node's
`leaves` are the spans [start, stop) of the step in work that go from it to others. The `elapsed_seconds` of
train are the training time of all sessions up to the end of its step: with `train.max_hours` the learning rate of the
next step follows them. The cost of failures is told by `leaves_recomputed`, `seconds_paused` and `disturbed` of train,
by `paused` and `seconds` of the stages at the two ends of a pause, and by `steps_again` and `seconds_lost` of the stage
that says what a resumed run does again.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from mlxdist.coordinator.cluster.events import NodeNews
from mlxdist.coordinator.report.display import Display
from mlxdist.coordinator.report.event_file import EventFile
from mlxdist.coordinator.report.format import (
    StepReport,
    lost_time_phrase,
    numbers_phrase,
    redone_phrase,
    step_phrase,
    val_phrase,
)
from mlxdist.coordinator.report.goodput import Ledger, LostTime
from mlxdist.coordinator.report.history import BestVal, events, read_history, trim_metrics
from mlxdist.coordinator.report.news_filter import NewsFilter
from mlxdist.coordinator.report.printed_lines import PrintedLines
from mlxdist.coordinator.report.sinks import Sink
from mlxdist.coordinator.report.summary import Ending, Results, Told, summary_of
from mlxdist.coordinator.storage.run_folder import RunFolder, finite, write_json
from mlxdist.protocol.errors import SaveError
from mlxdist.protocol.numerics import Promise

WORK_SECONDS = 1.0  # a quick run's file gets the work of an undisturbed step no more often than this
_STAGE_GRAIN = 0.05  # a stage's progress gets a line of the file for every such part


def utc_now() -> datetime:
    """Returns the wall clock's time, for the events' `time`."""
    return datetime.now(UTC)


class Reporter:
    """Tells a run's events. Safe to call from several threads.

    Args:
        run: where the files go.
        display: what the person sees; the reporter does not know which kind.
        clock: monotonic seconds.
        now: the wall clock.
        listen: called with each event, as the file has it, in the thread that told it.
        sinks: take each event too; they have ended when the end of the run is shown.

    A line that cannot be written waits, and the person is told once; only `write_summary` raises SaveError.
    """

    def __init__(
        self,
        run: RunFolder,
        display: Display,
        *,
        clock: Callable[[], float],
        now: Callable[[], datetime] = utc_now,
        listen: Callable[[Mapping[str, object]], None] = lambda event: None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self._run = run
        self._display = display
        self._clock = clock
        self._now, self._listen, self._sinks = now, listen, tuple(sinks)
        self._began = clock()
        self._train_losses: dict[int, float | None] = {}
        self._vals: dict[int, Mapping[str, float | None]] = {}
        self._best: BestVal | None = None
        self._peak_gb: float | None = None
        self._filter = NewsFilter()
        self._printed = PrintedLines()
        self._ledger = Ledger()
        self._stage: tuple[str, float | None] = ("", None)
        self._lock = threading.Lock()
        self._file = EventFile(run.metrics_jsonl)
        self._unsaved: set[str] = set()
        self._work_told = float("-inf")
        self.ended = False  # the end of the run was told

    def resume_after(self, step: int) -> None:
        """Goes on with the run's earlier sessions after their `step`: later steps are cut off from the file.

        The time that those steps took stays in the wall seconds, and is said and counted as lost.
        """
        with self._lock:
            whole = read_history(self._run.metrics_jsonl)
            trim_metrics(self._run.metrics_jsonl, step)
            history = read_history(self._run.metrics_jsonl)
            self._began -= whole.wall_seconds
            self._train_losses, self._vals = dict(history.train_losses), dict(history.vals)
            self._best, self._peak_gb = history.best, history.peak_gb
            redone = self._ledger.go_on(step, whole.step_times, whole.pauses, history.redone)
        self._display.recall(event for _, event in events(self._run.metrics_jsonl))
        message = redone_phrase(step, redone)
        keys = {"steps_again": redone.steps, "seconds_lost": redone.seconds, "leaves_recomputed": redone.leaves}
        if redone.steps:
            self._tell("stage", {"message": message, "note": True, **keys})
        elif step:
            self.note(message)

    def stage(self, message: str, progress: float | None = None) -> None:
        """Tells what the run is busy with outside of its steps; `progress` in [0, 1] where it is known."""
        with self._lock:
            before, reached = self._stage
            moved = progress is not None and (reached is None or progress >= min(reached + _STAGE_GRAIN, 1.0) > reached)
            worth_a_line = message != before or moved
            if worth_a_line:
                self._stage = (message, progress)
        if worth_a_line:
            self._tell("stage", {"message": message} | ({} if progress is None else {"progress": progress}))
        self._display.stage(message, progress)

    def note(self, sentence: str) -> None:
        """Tells a sentence that the person should find again: it stays on the screen, and in the file as a stage."""
        self._tell("stage", {"message": sentence, "note": True})

    def say(self, sentence: str) -> None:
        """Tells a sentence on the screen alone: a file is no place for a code."""
        self._display.say(sentence)

    def step(self, report: StepReport) -> None:
        """Tells one finished step: its numbers, the nodes' speeds and their work, and its advice if there is some."""
        with self._lock:
            self._train_losses[report.step] = report.loss
            if report.peak_gb is not None:
                self._peak_gb = max(report.peak_gb, self._peak_gb or 0.0)
            time = self._ledger.step(report.step, report.seconds, report.all_tokens, report.leaves_recomputed)
        self._tell(
            "train",
            {
                "step": report.step,
                "total_steps": report.total_steps,
                "progress": report.progress,
                "message": f"{step_phrase(report)}: {numbers_phrase(report)}",
                "loss": report.loss,
                "grad_norm": report.grad_norm,
                "learning_rate": report.learning_rate,
                "tokens": report.tokens,
                "tokens_per_second": report.tokens_per_second,
                "all_tokens_per_second": report.all_tokens / report.seconds,
                "seconds": report.seconds,
                "elapsed_seconds": report.elapsed_seconds,
                "disturbed": time.disturbed,
                "leaves_recomputed": time.leaves_recomputed,
                "seconds_paused": time.seconds_paused,
                "peak_gb": report.peak_gb,
                **report.metrics,
            },
        )
        if report.work and self._work_is_due(time.disturbed):
            nodes = {name: asdict(work) for name, work in report.work.items()}
            self._tell("work", {"step": report.step, "nodes": nodes})
        if report.advice:
            self.note(report.advice)

    def val(self, step: int, loss: float, metrics: Mapping[str, float], seconds: float) -> None:
        """Tells one finished evaluation of the adapter that `step` made."""
        with self._lock:
            self._vals[step] = {"loss": loss, **metrics}
            paused = self._ledger.evaluation(step)
        keys = {"loss": loss, "metrics": metrics, "seconds": seconds, "seconds_paused": paused}
        self._tell("val", {"step": step, "message": val_phrase(step, loss, metrics), **keys})

    def node(self, news: NodeNews) -> None:
        """Tells that a node's state or message changed; telling the same twice writes nothing.

        The event says whether the news should stay readable: a loss, with what was done, and the node's return.
        """
        name, state, message = news.name, news.state, news.message
        with self._lock:
            importance = self._filter.weigh(news, self._clock())
            if importance is None:
                return
            if importance.trouble:
                self._ledger.trouble()
        self._tell(
            "node",
            {
                "name": name,
                "state": state,
                "message": message,
                "cause": news.cause,
                "action": news.action,
                "leaves": [(span.start, span.stop) for span in news.leaves],
                "stays": importance.stays,
            },
        )

    def printed(self, name: str, line: str) -> None:
        """Shows a line that a node has printed, as long as they are few; its log has them all."""
        with self._lock:
            lines = self._printed.shown(name, line, self._clock())
        for each in lines:
            self._display.say(each)

    def paused(self, news: NodeNews) -> None:
        """Tells that the run waits for nodes (state "paused"), or goes on after `news.seconds`."""
        over = news.state != "paused"
        with self._lock:
            self._ledger.trouble(news.seconds)
        self._tell(
            "stage", {"message": news.message, "paused": not over, **({"seconds": news.seconds} if over else {})}
        )

    def promise(self, promise: Promise) -> None:
        """Tells what is promised about the bits from a step on."""
        keys = {"promise": promise.kind, "reason": promise.reason, "message": promise.sentence}
        self._tell("promise", {"step": promise.from_step, **keys})

    def checkpoint(self, step: int, path: Path, *, best: bool) -> None:
        """Tells that a checkpoint was saved; `best` where it is the best evaluation so far."""
        relative = path.relative_to(self._run.path).as_posix()
        if best:
            with self._lock:
                self._best = BestVal(step, self._vals.get(step, {}).get("loss"), relative)
        message = f"saved {relative}" + (", the best so far" if best else "")
        self._tell("checkpoint", {"step": step, "path": relative, "best": best, "message": message})

    def write_summary(self, ending: Ending, results: Results) -> None:
        """Writes `metrics.json`, and the events that still wait. Raises SaveError."""
        with self._lock:
            self._file.flush()
        told = Told(
            self._train_losses, self._vals, self._best, self._peak_gb, self._clock() - self._began, self._lost_time()
        )
        write_json(self._run.metrics_json, summary_of(ending, told, results, self._run.path))

    def done(self, message: str, ending: Ending, shown: str = "") -> None:
        """Tells the end of the run: the last event with its `message`, the cost of failures, and the closing sentence.

        `shown`: the closing sentence on the terminal, where it is not `message`.
        """
        last = max(self._train_losses, default=0)
        lost = self._lost_time()
        self._tell("done", {"status": ending, "step": last, "message": message, **asdict(lost)})
        self.close()
        if last:
            self._display.say(lost_time_phrase(lost))
        self._display.end(shown or message)
        self.ended = True

    def close(self, failure: str = "") -> None:
        """Ends the sinks, once, and shows their last words. `failure`: as `Sink.end`."""
        with self._lock:
            sinks, self._sinks = self._sinks, ()
        if sinks:
            self._display.stage("waiting for the last metrics and messages to be sent", None)
        for sink in sinks:
            for sentence in sink.end(failure):
                self._display.say(sentence)

    def could_not_save(self, what: str, error: SaveError) -> None:
        """Tells that something could not be written while the run goes on: once for a series of failures."""
        with self._lock:
            first = not self._unsaved
            self._unsaved.add(what)
        if first:
            self.note(f"{error.what} The run goes on, and writing is tried again: {error.cure}.")

    def saved(self, what: str) -> None:
        """Notes that something was written; it is told when that ends a series of failures."""
        with self._lock:
            last = self._unsaved == {what}
            self._unsaved.discard(what)
        if last:
            self.note("writing works again")

    def sync(self) -> None:
        """Flushes the events to the disk: before the state is, so that no step of it is missing after a power cut."""
        with self._lock:
            failure = self._file.sync()
        self._saw(failure)

    def _work_is_due(self, disturbed: bool) -> bool:
        """Returns true for a disturbed step, and where the last line about work is long enough ago."""
        with self._lock:
            now = self._clock()
            due = disturbed or now - self._work_told >= WORK_SECONDS
            if due:
                self._work_told = now
        return due

    def _lost_time(self) -> LostTime:
        with self._lock:
            return self._ledger.lost_time(self._clock() - self._began)

    def _tell(self, event: str, keys: Mapping[str, object]) -> None:
        """Appends one event, whole and flushed."""
        with self._lock:
            wall = round(self._clock() - self._began, 3)
            head = {"event": event, "time": self._now().isoformat(timespec="seconds"), "wall_seconds": wall}
            content = {key: finite(value) for key, value in {**head, **keys}.items()}
            failure = self._file.add(json.dumps(content, ensure_ascii=False, allow_nan=False))
        self._saw(failure)
        self._display.take(content)
        self._listen(content)
        keep = self._display.say if event == "done" else self.note  # no event comes after "done"
        for sink in self._sinks:
            for sentence in sink.take(content):
                keep(sentence)

    def _saw(self, failure: SaveError | None) -> None:
        if failure is None:
            self.saved(self._file.path.name)
        else:
            self.could_not_save(self._file.path.name, failure)
