"""One run in several sessions in one folder, and the places where a session is interrupted."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from mlxdist.coordinator.config.schema import BatchConfig, DataConfig, LoraConfig, RunConfig, TrainConfig
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.methods.kinds import Sft
from mlxdist.coordinator.report.display import Display
from mlxdist.coordinator.report.format import StepReport
from mlxdist.coordinator.report.reporter import Reporter
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.coordinator.train import Run, train
from mlxdist.coordinator.training.adamw import no_moments
from mlxdist.coordinator.training.initial_adapter import draw
from mlxdist.coordinator.training.resume import continued, earlier_sessions, recorded_seconds
from mlxdist.coordinator.training.saver import Saver
from mlxdist.coordinator.training.state import State, identity_of
from mlxdist.coordinator.training.validation import Evaluation, Validation
from mlxdist.node.work.engine import Engine
from mlxdist.protocol.leaves import Row
from tests.laws.memory_fleet import ListRows, make_row, memory_fleet
from tests.laws.model_folder import VOCABULARY

STEPS = 8
TOLD = ("event", "step", "loss", "grad_norm", "learning_rate", "elapsed_seconds", "tokens", "metrics", "best", "path")


class Dark:
    """A display that shows nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given, **named: None


class InterruptedSaver(Saver):
    """Ctrl-C in the moment after a step was saved."""

    at: int = 0

    def save_if_due(self, state: State, last: bool) -> None:
        super().save_if_due(state, last)
        if state.step == self.at:
            raise KeyboardInterrupt


class InterruptedValidation(Validation):
    """Ctrl-C in the middle of an evaluation."""

    at: int = 0

    def evaluate(self, fleet: Fleet, state: State, step_seconds: float) -> tuple[Evaluation | None, State]:
        if state.step == self.at:
            raise KeyboardInterrupt
        return super().evaluate(fleet, state, step_seconds)


class InterruptedReporter(Reporter):
    """Ctrl-C after a step was taken, before it was told."""

    at: int = 0

    def step(self, report: StepReport) -> None:
        if report.step == self.at:
            raise KeyboardInterrupt
        super().step(report)


class LastSaver(Saver):
    """A coordinator that is killed before it saves a state after step `at`; every step until then is told."""

    at: int = 0

    def save_if_due(self, state: State, last: bool) -> None:
        if state.step <= self.at:
            super().save_if_due(state, last)


SAVERS: dict[str, type[Saver]] = {"save": InterruptedSaver, "kill": LastSaver}


def pace(seed: int | None) -> Callable[[], float]:
    """A clock whose readings are a second apart, or for a seed some random time."""
    random, now = np.random.default_rng(seed), 0.0

    def read() -> float:
        nonlocal now
        now += 1.0 if seed is None else float(random.uniform(0.3, 2.0))
        return now

    return read


def rows(count: int, seed: int) -> list[Row]:
    random = np.random.default_rng(seed)
    lengths = random.integers(4, 30, count).tolist()
    return [make_row(i, random.integers(0, VOCABULARY, n).tolist(), n // 2) for i, n in enumerate(lengths)]


@dataclass
class Sessions:
    """The sessions of one run in one folder."""

    model: Path
    engines: Sequence[Engine]
    folder: Path
    early_stop_evals: int = 0
    max_hours: float | None = None  # in place of STEPS
    seed: int | None = None  # of the clock

    @property
    def config(self) -> RunConfig:
        """Dropout, warmup, a falling learning rate, several epochs, steps of two windows: what a step depends on."""
        return RunConfig(
            model=str(self.model),
            output=self.folder,
            data=DataConfig(path="none"),
            batch=BatchConfig(size=3, grad_accum_steps=2, leaf_tokens=60, max_length=32),
            lora=LoraConfig(rank=4, dropout=0.3),
            train=TrainConfig(
                steps=STEPS if self.max_hours is None else None,
                max_hours=self.max_hours,
                learning_rate=3e-2,
                schedule="cosine",
                warmup_steps=3 if self.max_hours is None else "auto",
                eval_every=2,
                eval_rows="all",
                save_every=1,
                early_stop_evals=self.early_stop_evals,
            ),
        )

    def session(
        self, *, interrupt: str = "", at: int = 0, nodes: int = 1, plant: Callable[[State], State] = lambda state: state
    ) -> State:
        """One session from the saved state on. `interrupt`: "save" | "evaluation" | "report" | "kill", in step `at`."""
        config, run = self.config, RunFolder(self.folder)
        for folder in (run.state, run.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        data, valid = ListRows(rows(14, 1)), ListRows(rows(4, 2))
        report = (InterruptedReporter if interrupt == "report" else Reporter)(
            run, cast(Display, Dark()), clock=lambda: 0.0
        )
        with memory_fleet(config, self.engines[:nodes]) as fleet:
            manifest = fleet.wait_for_model().manifest
            method = Sft(config, cast(Any, data), cast(Any, valid))
            identity = identity_of("same", manifest, "model", "rows")
            earlier = earlier_sessions(run)
            if earlier is None:
                vector = draw(manifest, 0)
                state = State(vector, no_moments(len(vector)), method.unknown_references())
            else:
                state = plant(continued(earlier, run, identity, method.unknown_references()))
            recorded = recorded_seconds(run, state.step)
            report.resume_after(state.step)
            fleet.send_adapter(state.step, state.adapter)
            fleet.wait_for_nodes(nodes, nodes, 0.0)
            saver = SAVERS.get(interrupt, Saver)(run, config, manifest, identity, report)
            validation = (InterruptedValidation if interrupt == "evaluation" else Validation)(
                config, method, len(valid), report
            )
            for one in (report, saver, validation):
                if hasattr(one, "at"):
                    one.at = at
            loop = Run(
                config, method, data, validation, config.train.steps, fleet, report, saver, pace(self.seed), recorded
            )
            if interrupt in ("", "kill"):
                return train(loop, state)
            with pytest.raises(KeyboardInterrupt):
                train(loop, state)
            return state

    def told(self) -> list[dict[str, object]]:
        """The steps in metrics.jsonl, without times."""
        lines = [
            json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines() if "step" in line
        ]
        # That steps are taken again is said; the work of nodes is told no more often than once a second.
        lines = [line for line in lines if line["event"] not in ("stage", "work")]
        return [{key: line[key] for key in TOLD if key in line} for line in lines]
