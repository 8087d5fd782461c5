"""The reporter: what happens goes to `metrics.jsonl` as it happens, to the person watching, and into `metrics.json`.

Each line of `metrics.jsonl` is one JSON object with `event`, `time` (UTC), `wall_seconds` (of all lives of the run) and
the event's own keys; `progress` is in [0, 1]; a number that is not finite is null.

    stage {message, progress?}     train {step, total_steps, progress, message, loss, grad_norm, …}
    checkpoint {step, path, best}  val {step, message, loss, metrics, seconds}
    done {status, step, message}   node {name, state, message, cause, action, leaves}

A node's `leaves` are the runs [start, stop) of the step in work that go from it to others. What losses cost is told by
`leaves_recomputed`, `seconds_paused` and `disturbed` of train, by `paused` and `seconds` of the stages that say a pause
and its end, and by `steps_again` and `seconds_lost` of the stage that says what a resumed run does again.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypedDict, Unpack

from mlxdist.coordinator.cluster.events import NodeNews
from mlxdist.coordinator.report.event_file import EventFile
from mlxdist.coordinator.report.format import (
    StepReport,
    again_phrase,
    losses_phrase,
    numbers_phrase,
    step_phrase,
    val_phrase,
)
from mlxdist.coordinator.report.goodput import Ledger, Losses
from mlxdist.coordinator.report.history import BestVal, read_history, trim_metrics
from mlxdist.coordinator.report.news_filter import Calm
from mlxdist.coordinator.report.plain import Display
from mlxdist.coordinator.storage.run_folder import RunFolder, finite, write_json
from mlxdist.protocol.errors import SaveError

_STAGE_GRAIN = 0.05  # a stage's progress gets a line of the file for every such part

Status = Literal["done", "interrupted", "failed"]


class Summary(TypedDict):
    """What `metrics.json` gets beside what was told."""

    status: Status  # all steps done, stopped by the user after a save, or an error
    config: Mapping[str, object]  # resolved
    applied_ranks: Mapping[str, int]  # by module path
    checkpoints: Sequence[Path]  # those there are, oldest first


def utc_now() -> datetime:
    """The wall clock, for the events' `time`."""
    return datetime.now(UTC)


class Reporter:
    """Tells a run's events. Safe to call from several threads.

    Args:
        run: where the files go.
        display: what the person sees; the reporter does not know which kind.
        clock: monotonic seconds.
        now: the wall clock.

    A line that cannot be written waits, and the person is told once; only `summary` and `done` raise SaveError.
    """

    def __init__(
        self,
        run: RunFolder,
        display: Display,
        *,
        clock: Callable[[], float],
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._run = run
        self._display = display
        self._clock = clock
        self._now = now
        self._began = clock()
        self._train_losses: dict[int, float | None] = {}
        self._vals: dict[int, Mapping[str, float | None]] = {}
        self._best: BestVal | None = None
        self._peak_gb: float | None = None
        self._calm = Calm()
        self._ledger = Ledger()
        self._stage: tuple[str, float | None] = ("", None)
        self._lock = threading.Lock()
        self._file = EventFile(run.metrics_jsonl)
        self._unsaved: set[str] = set()

    def resume_after(self, step: int) -> None:
        """Go on with the run's earlier lives after their `step`: what they told of later steps is cut off.

        The time that those steps took stays in the wall seconds, and is said and counted as lost.
        """
        with self._lock:
            whole = read_history(self._run.metrics_jsonl)
            trim_metrics(self._run.metrics_jsonl, step)
            history = read_history(self._run.metrics_jsonl)
            self._began -= whole.wall_seconds
            self._train_losses, self._vals = dict(history.train_losses), dict(history.vals)
            self._best, self._peak_gb = history.best, history.peak_gb
            again = self._ledger.go_on(step, whole.step_times, whole.pauses, history.again)
        if again.steps:
            message = again_phrase(step, again)
            keys = {"steps_again": again.steps, "seconds_lost": again.seconds, "leaves_recomputed": again.leaves}
            self._tell("stage", {"message": message, **keys})
            self._display.say(message)

    def stage(self, message: str, progress: float | None = None) -> None:
        """What the run is busy with before, between and after steps; `progress` in [0, 1] where it is known."""
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
        """A sentence that the person should find again: it stays on the screen and in the file, as a stage."""
        self._tell("stage", {"message": sentence})
        self._display.say(sentence)

    def train(self, report: StepReport) -> None:
        """One finished step."""
        with self._lock:
            self._train_losses[report.step] = report.loss
            if report.peak_gb is not None:
                self._peak_gb = max(report.peak_gb, self._peak_gb or 0.0)
            tokens = report.all_tokens_per_second * report.seconds
            time = self._ledger.step(report.step, report.seconds, tokens, report.leaves_recomputed)
        total = report.total_steps
        self._tell(
            "train",
            {
                "step": report.step,
                "total_steps": total,
                "progress": None if total is None else min(report.step / total, 1.0),
                "message": f"{step_phrase(report)}: {numbers_phrase(report)}",
                "loss": report.loss,
                "grad_norm": report.grad_norm,
                "learning_rate": report.learning_rate,
                "tokens": report.tokens,
                "tokens_per_second": report.tokens_per_second,
                "all_tokens_per_second": report.all_tokens_per_second,
                "seconds": report.seconds,
                "disturbed": time.disturbed,
                "leaves_recomputed": time.leaves_recomputed,
                "seconds_paused": time.seconds_paused,
                "peak_gb": report.peak_gb,
                **report.extra,
            },
        )
        self._display.step(report)

    def val(self, step: int, loss: float, metrics: Mapping[str, float], seconds: float) -> None:
        """One finished evaluation of the adapter that `step` made."""
        with self._lock:
            self._vals[step] = {"loss": loss, **metrics}
            paused = self._ledger.evaluation(step)
        keys = {"loss": loss, "metrics": metrics, "seconds": seconds, "seconds_paused": paused}
        self._tell("val", {"step": step, "message": val_phrase(step, loss, metrics), **keys})
        self._display.val(step, loss, metrics)

    def node(self, news: NodeNews) -> None:
        """A node's state or message changed; telling the same twice writes nothing.

        The display is told what should stay readable: a loss, with what was done, and the node's return.
        """
        name, state, message = news.name, news.state, news.message
        with self._lock:
            verdict = self._calm.judge(news, self._clock())
            if verdict is None:
                return
            if verdict.trouble:
                self._ledger.trouble()
        self._tell(
            "node",
            {
                "name": name,
                "state": state,
                "message": message,
                "cause": news.cause,
                "action": news.action,
                "leaves": [(run.start, run.stop) for run in news.leaves],
            },
        )
        self._display.node(name, state, message, stays=verdict.stays)

    def paused(self, news: NodeNews) -> None:
        """The run waits for nodes (state "paused"), or goes on after `news.seconds`."""
        over = news.state != "paused"
        with self._lock:
            self._ledger.trouble(news.seconds)
        self._tell(
            "stage", {"message": news.message, "paused": not over, **({"seconds": news.seconds} if over else {})}
        )
        self._display.pause(news.message, over=over)

    def losses(self) -> Losses:
        """What losses have cost so far, over all lives of the run."""
        with self._lock:
            return self._ledger.losses(self._clock() - self._began)

    def node_speed(self, name: str, tokens_per_second: float) -> None:
        """A node's measured speed, for the screen alone."""
        self._display.node_speed(name, tokens_per_second)

    def checkpoint(self, step: int, path: Path, *, best: bool) -> None:
        """A checkpoint was saved; `best` where it is the best evaluation so far."""
        relative = path.relative_to(self._run.path).as_posix()
        if best:
            with self._lock:
                self._best = BestVal(step, self._vals.get(step, {}).get("loss"), relative)
        message = f"saved {relative}" + (", the best so far" if best else "")
        self._tell("checkpoint", {"step": step, "path": relative, "best": best, "message": message})
        self._display.say(message)

    def done(self, message: str, **summary: Unpack[Summary]) -> None:
        """The end of the run, for whatever reason: the last event, the sentence, and the summary. Raises SaveError."""
        last = max(self._train_losses, default=0)
        cost = self.losses()
        self._tell("done", {"status": summary["status"], "step": last, "message": message, **asdict(cost)})
        try:
            self.summary(**summary)
        finally:
            if last:
                self._display.say(losses_phrase(cost))
            self._display.end(message)

    def summary(self, **of: Unpack[Summary]) -> None:
        """Write `metrics.json`, and whatever lines still wait. Raises SaveError."""
        with self._lock:
            self._file.flush()
        steps = sorted(self._train_losses)
        last = steps[-1] if steps else 0
        cost = self.losses()
        trajectory = [{"step": step, **self._vals[step]} for step in sorted(self._vals)]
        best = self._best
        write_json(
            self._run.metrics_json,
            {
                "status": of["status"],
                "steps": last,
                "wall_seconds": round(self._clock() - self._began, 3),
                "peak_gb": self._peak_gb,
                "losses": {key: round(value, 3) if value is not None else None for key, value in asdict(cost).items()},
                "final_train_loss": self._train_losses[last] if steps else None,
                "final_val_loss": trajectory[-1]["loss"] if trajectory else None,
                "best_val": best and {"step": best.step, "loss": best.loss, "checkpoint": best.checkpoint},
                "val_trajectory": trajectory,
                "train_losses": [self._train_losses[step] for step in steps],
                "applied_ranks": of["applied_ranks"],
                "checkpoints": [path.relative_to(self._run.path).as_posix() for path in of["checkpoints"]],
                "config": of["config"],
            },
        )

    def could_not_save(self, what: str, error: SaveError) -> None:
        """Something could not be written while the run goes on: the first of a series is said."""
        with self._lock:
            first = not self._unsaved
            self._unsaved.add(what)
        if first:
            self.note(f"{error.what} The run goes on, and writing is tried again: {error.cure}.")

    def saved(self, what: str) -> None:
        """Something was written; it is said when that ends a series of failures."""
        with self._lock:
            last = self._unsaved == {what}
            self._unsaved.discard(what)
        if last:
            self.note("writing works again")

    def sync(self) -> None:
        """Flush the events to the disk: before the state is, so that no step of it is missing after a power cut."""
        with self._lock:
            failure = self._file.sync()
        self._said(failure)

    def _tell(self, event: str, keys: Mapping[str, object]) -> None:
        """Append one event, whole and flushed."""
        with self._lock:
            wall = round(self._clock() - self._began, 3)
            head = {"event": event, "time": self._now().isoformat(timespec="seconds"), "wall_seconds": wall}
            line = json.dumps(finite({**head, **keys}), ensure_ascii=False, allow_nan=False)
            failure = self._file.add(line)
        self._said(failure)

    def _said(self, failure: SaveError | None) -> None:
        if failure is None:
            self.saved(self._file.path.name)
        else:
            self.could_not_save(self._file.path.name, failure)
