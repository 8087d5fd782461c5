"""Evaluation: the steps at which the validation rows are scored, their number, and the best evaluation."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.methods.method import Method
from mlxdist.coordinator.report.format import count
from mlxdist.coordinator.report.reporter import Reporter
from mlxdist.coordinator.training.state import Best, State

SHARE_OF_TIME = 0.05  # what eval_rows = "auto" may take
FORWARD_SHARE = 1 / 3  # of a gradient's time that a score takes: one forward of forward and two-part backward


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation."""

    step: int
    loss: float
    is_best: bool


@dataclass
class Validation:
    """The evaluations of a run with `rows` validation rows; 0: there are none."""

    config: RunConfig
    method: Method
    rows: int
    report: Reporter
    clock: Callable[[], float] = time.monotonic

    def due(self, step: int, last: bool) -> bool:
        """Returns true where the adapter of `step` is evaluated and saved: every `eval_every` steps, and at the end."""
        every = self.config.train.eval_every
        return bool(every) and (last or step % every == 0)

    def evaluate(self, fleet: Fleet, state: State, step_seconds: float) -> tuple[Evaluation | None, State]:
        """Scores the validation rows; the state then knows the best evaluation. None without validation rows.

        `step_seconds` is the time of the last step, from which "auto" finds its number of rows once and for all.
        """
        if not self.rows:
            return None, state
        if not state.eval_rows:
            state = replace(state, eval_rows=self.rows_to_score(step_seconds))
        self.report.stage(f"scoring {count(state.eval_rows, 'validation row')}")
        began = self.clock()
        metrics, references = self.method.evaluate(fleet, state.eval_rows, state.step, state.references)
        loss = metrics.pop("loss")
        self.report.val(state.step, loss, metrics, self.clock() - began)
        by = self.config.train.best_by
        value = loss if by == "loss" else -metrics[by]
        is_best = state.best.value is None or value < state.best.value
        best = Best(state.step, value) if is_best else replace(state.best, evals_since=state.best.evals_since + 1)
        return Evaluation(state.step, loss, is_best), replace(state, best=best, references=references)

    def rows_to_score(self, step_seconds: float) -> int:
        """Returns a number of validation rows: all, the number asked for, or as many as take 5 % of the time."""
        wanted = self.config.train.eval_rows
        if wanted == "all":
            return self.rows
        if wanted != "auto":
            return min(int(wanted), self.rows)
        batch, every = self.config.batch, self.config.train.eval_every
        row_seconds = FORWARD_SHARE * step_seconds / (batch.size * batch.grad_accum_steps)
        affordable = int(SHARE_OF_TIME * every * step_seconds / max(row_seconds, 1e-9))
        return min(max(affordable, batch.size), self.rows)
