"""The training loop, one page: the story of a run from its first step to its last.

    global batch -> leaves -> the fleet's gradient sums -> one division, one clip, one optimizer step -> the new adapter

Nothing here knows how many nodes there are, or which method it trains.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from mlxdist.coordinator.batch.batch_order import Step, steps
from mlxdist.coordinator.batch.row_store import Rows
from mlxdist.coordinator.cluster.audit import TaintedError
from mlxdist.coordinator.config.schema import RunConfig, warmup_steps
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.methods.method import Method, StepAnswer, all_tokens, supervised_tokens
from mlxdist.coordinator.report.format import StepReport
from mlxdist.coordinator.report.reporter import Reporter
from mlxdist.coordinator.training.clipping import clip
from mlxdist.coordinator.training.optimizer import optimizer_of
from mlxdist.coordinator.training.saver import Saver
from mlxdist.coordinator.training.schedule import learning_rate
from mlxdist.coordinator.training.state import State
from mlxdist.coordinator.training.validation import Validation


@dataclass(frozen=True)
class Run:
    """What the loop works with. `total_steps` is None when only the time is limited."""

    config: RunConfig
    method: Method
    rows: Rows
    validation: Validation
    total_steps: int | None
    fleet: Fleet
    report: Reporter
    saver: Saver
    clock: Callable[[], float] = time.monotonic

    def order(self) -> Iterator[Step]:
        """The steps of the run, endless: a pure function of the data's lengths and the configuration."""
        return steps(self.rows.lengths.tolist(), self.config.batch, self.config.method)


def train(run: Run, state: State) -> State:
    """Take the steps that are left after `state`, and return the state after the last one.

    An interrupt (KeyboardInterrupt) saves the last whole step, its evaluation included, and is raised again. Raises
    NonFiniteError and NodeError; no step is half taken then.
    """
    train_ = run.config.train
    if stops_early(train_.early_stop_evals, state):  # a resumed run that had come to its end
        return state
    began, whole = run.clock(), state
    optimizer = optimizer_of(train_)
    recomputed = run.fleet.leaves_recomputed()
    run.fleet.send_adapter(state.step, state.adapter)
    try:
        for step in islice(run.order(), state.step, run.total_steps):
            step_began = run.clock()
            answer = whole_gradient(run, step, state)
            gradient, grad_norm = clip(answer.grad_sum, answer.weight, train_.max_grad_norm)
            rate = step_learning_rate(run.config, step.number, run.total_steps)
            adapter, moments = optimizer.update(state.adapter, gradient, state.moments, rate)
            state = replace(state, adapter=adapter, moments=moments, references=answer.references)
            run.fleet.send_adapter(state.step, state.adapter)

            seconds = run.clock() - step_began
            tokens = supervised_tokens(answer.leaves)
            before, recomputed = recomputed, run.fleet.leaves_recomputed()
            run.report.train(
                StepReport(
                    step=state.step,
                    total_steps=run.total_steps,
                    loss=answer.metrics["loss"],
                    grad_norm=grad_norm,
                    learning_rate=rate,
                    tokens=tokens,
                    tokens_per_second=tokens / seconds,
                    all_tokens_per_second=all_tokens(answer.leaves) / seconds,
                    seconds=seconds,
                    peak_gb=run.fleet.peak_gb(),
                    say_memory=train_.report_memory,
                    leaves_recomputed=recomputed - before,
                    extra={name: value for name, value in answer.metrics.items() if name != "loss"},
                )
            )
            if advice := run.method.advice(answer.metrics):
                run.report.note(advice)
            for name, speed in run.fleet.node_speeds().items():
                run.report.node_speed(name, speed)

            last = state.step == run.total_steps or out_of_time(train_.max_hours, run.clock() - began)
            if run.validation.due(state.step, last):
                evaluation, state = run.validation.evaluate(run.fleet, state, seconds)
                run.saver.checkpoint(state, evaluation)
            last = last or stops_early(train_.early_stop_evals, state)
            run.saver.save_if_due(state, last)
            whole = state
            if last:
                break
    except KeyboardInterrupt:
        run.saver.save(whole)  # a step without its evaluation would not be evaluated after --resume either
        raise
    return state


def whole_gradient(run: Run, step: Step, state: State) -> StepAnswer:
    """The step's gradient sum, from nodes that no audit of the step has found wrong."""
    while True:
        try:
            return run.method.gradient(run.fleet, step, state.step, state.references)
        except TaintedError:
            continue  # one node fewer each time


def step_learning_rate(config: RunConfig, step: int, total_steps: int | None) -> float:
    """The learning rate of `step`; without a known end the schedule is constant after its warmup."""
    return learning_rate(
        step,
        base=config.train.learning_rate,
        schedule=config.train.schedule if total_steps is not None else "constant",
        warmup_steps=warmup_steps(config.train, total_steps or 0),
        total_steps=total_steps or 0,
        min_lr_ratio=config.train.min_lr_ratio,
    )


def out_of_time(max_hours: float | None, seconds: float) -> bool:
    """Whether the hours that the run may take are over."""
    return max_hours is not None and seconds >= 3600 * max_hours


def stops_early(early_stop_evals: int, state: State) -> bool:
    """Whether so many evaluations have come without a better one."""
    return 0 < early_stop_evals <= state.best.evals_since
