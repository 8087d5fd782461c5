"""The training loop, one page: the story of a run from its first step to its last.

    global batch -> leaves -> the fleet's gradient sums -> one division, one clip, one optimizer step -> the new adapter

Nothing here knows how many nodes there are, or which method it trains.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from mlxdist.coordinator.batch.batch_order import Step, steps
from mlxdist.coordinator.batch.row_store import Rows
from mlxdist.coordinator.cluster.audit import TaintedError
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.methods.method import Method, StepAnswer, all_tokens, supervised_tokens
from mlxdist.coordinator.report.format import StepReport
from mlxdist.coordinator.report.reporter import Reporter
from mlxdist.coordinator.training.clipping import clip
from mlxdist.coordinator.training.optimizer import optimizer_of
from mlxdist.coordinator.training.saver import Saver
from mlxdist.coordinator.training.schedule import step_learning_rate
from mlxdist.coordinator.training.state import State, is_over
from mlxdist.coordinator.training.validation import Validation


@dataclass(frozen=True)
class Run:
    """The parts that the loop works with.

    `total_steps` is None when only the time is limited. `recorded_seconds`: by step, the training time that an earlier
    session has told after it; a step that is done again ends at that time again, so that the next learning rate has
    the same bits.
    """

    config: RunConfig
    method: Method
    rows: Rows
    validation: Validation
    total_steps: int | None
    fleet: Fleet
    report: Reporter
    saver: Saver
    clock: Callable[[], float] = time.monotonic
    recorded_seconds: Mapping[int, float] = field(default_factory=dict)
    wants_stop: Callable[[], bool] = lambda: False  # asked after each step; the run then ends as by an interrupt

    def order(self) -> Iterator[Step]:
        """Yields the steps of the run without end: a pure function of the data's lengths and the configuration."""
        return steps(self.rows.lengths.tolist(), self.config.batch, self.config.method)

    def is_over(self, state: State) -> bool:
        """Returns true when no step is left after `state`."""
        return is_over(self.config.train, self.total_steps, state)


def train(run: Run, state: State) -> State:
    """Takes the steps that are left after `state`, and returns the state after the last one.

    The nodes have the adapter of `state` already. A step is whole when its adapter is evaluated, where that is due: an
    interrupt (KeyboardInterrupt) saves the last whole step and is raised again. Raises NonFiniteError and NodeError; no
    step is half taken then.
    """
    options = run.config.train
    if run.is_over(state):  # a resumed run that had come to its end
        return state
    optimizer = optimizer_of(options)
    ended = run.clock()
    try:
        for step in islice(run.order(), state.step, run.total_steps):
            step_began = run.clock()
            answer = step_answer(run, step, state)
            gradient, grad_norm = clip(answer.grad_sum, answer.weight, options.max_grad_norm)
            rate = step_learning_rate(options, step.number, run.total_steps, state.elapsed_seconds)
            adapter, moments = optimizer.update(state.adapter, gradient, state.moments, rate)
            run.fleet.send_adapter(moments.step, adapter)
            ended_before, ended = ended, run.clock()
            elapsed = run.recorded_seconds.get(step.number, state.elapsed_seconds + ended - ended_before)
            stepped = State(adapter, moments, answer.references, state.best, state.eval_rows, elapsed)

            run.report.step(step_report(run, stepped, answer, grad_norm, rate, step_began, ended))
            state = evaluated(run, stepped, ended - step_began, run.is_over(stepped))
            run.saver.save_if_due(state, run.is_over(state))
            if run.is_over(state):
                break
            if run.wants_stop():
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        run.saver.save(state)
        raise
    return state


def step_answer(run: Run, step: Step, state: State) -> StepAnswer:
    """Returns the step's gradient sum, from nodes that no audit of the step has found wrong."""
    while True:
        try:
            return run.method.gradient(run.fleet, step, state.step, state.references)
        except TaintedError:
            continue  # with one node fewer each time


def step_report(
    run: Run, state: State, answer: StepAnswer, grad_norm: float, learning_rate: float, began: float, ended: float
) -> StepReport:
    """Returns what is told of a step, from `began` to `ended`, that made `state`."""
    return StepReport(
        step=state.step,
        total_steps=run.total_steps,
        metrics=answer.metrics,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        tokens=supervised_tokens(answer.leaves),
        all_tokens=all_tokens(answer.leaves),
        seconds=ended - began,
        peak_gb=run.fleet.peak_gb(),
        leaves_recomputed=run.fleet.leaves_recomputed(),
        node_speeds=run.fleet.node_speeds(),
        work=run.fleet.node_work(began),
        advice=run.method.advice(answer.metrics),
        say_memory=run.config.train.report_memory,
        elapsed_seconds=state.elapsed_seconds,
        max_hours=run.config.train.max_hours,
    )


def evaluated(run: Run, state: State, step_seconds: float, last: bool) -> State:
    """Returns the state with its evaluation, where one is due; a checkpoint is saved then."""
    if not run.validation.due(state.step, last):
        return state
    evaluation, state = run.validation.evaluate(run.fleet, state, step_seconds)
    run.saver.checkpoint(state, evaluation)
    return state
