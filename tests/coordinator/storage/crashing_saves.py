"""A process that is killed at every stage of a save: before each thing that it does to a file, and within a write.

Run as `python -m tests.coordinator.storage.crashing_saves FOLDER`: every crash leaves a copy of FOLDER as it
was then, named by its stage.
"""

import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from mlxdist.coordinator.config.schema import DataConfig, RunConfig, TrainConfig
from mlxdist.coordinator.report.reporter import Reporter
from mlxdist.coordinator.report.summary import Results
from mlxdist.coordinator.storage.run_folder import RunFolder, write_json
from mlxdist.coordinator.training.adamw import no_moments
from mlxdist.coordinator.training.saver import Saver
from mlxdist.coordinator.training.state import State, identity_of
from mlxdist.coordinator.training.validation import Evaluation
from mlxdist.protocol import manifest as manifests

MANIFEST = manifests.make({"model.layers.0.q_proj.lora_a": (40, 4), "model.layers.0.q_proj.lora_b": (4, 30)})
EVENTS = ("open", "os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.truncate")
CUTS = (0, 1, 8, 100, 700, 1200, 1500, 3000, 4000)  # bytes that a file may have when the power goes; the state has more
ONLY_READS = os.O_WRONLY | os.O_RDWR


class NoReport:
    """Says nothing, and writes the number of steps as the summary."""

    def __init__(self, run: RunFolder, step: int) -> None:
        self.run, self.step = run, step

    def write_summary(self, ending: str, results: Results) -> None:
        write_json(self.run.metrics_json, {"steps": self.step})

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given, **named: None


def save_step(folder: Path, step: int) -> None:
    """All that a run saves of a step: a best checkpoint, whose older one goes, the state, the adapter, a summary."""
    train = TrainConfig(save_every=1, keep_checkpoints=1)
    config = RunConfig(model="m", output=folder, data=DataConfig(path="d"), train=train)
    run = RunFolder(folder)
    report = cast(Reporter, NoReport(run, step))
    saver = Saver(run, config, MANIFEST, identity_of("same", MANIFEST, "model", ""), report)
    size = manifests.size(MANIFEST)
    state = State(np.full(size, step, np.float32), replace(no_moments(size), step=step))
    saver.checkpoint(state, Evaluation(step, 1.0 / step if step else 9.0, is_best=True))
    saver.save_if_due(state, last=False)
    saver.final(state)


def kill_at(stage: int, folder: Path) -> None:
    """SIGKILL before the `stage`th thing that is done to a file in `folder`, counted from 0."""
    done = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal done
        if event not in EVENTS or not str(arguments[0]).startswith(str(folder)):
            return
        if event == "open" and not cast(int, arguments[2]) & ONLY_READS:
            return
        if done == stage:
            os.kill(os.getpid(), signal.SIGKILL)
        done += 1

    sys.addaudithook(hook)


def cut_at(size: int) -> None:
    """End the process in the write that would make a file longer than `size` bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def crashes(folder: Path, step: int, prepare: Callable[[], None]) -> bool:
    """Saves `step` in a process of its own; returns true when that process crashed."""
    pid = os.fork()
    if pid == 0:
        prepare()
        save_step(folder, step)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL, -signal.SIGXFSZ), code
    return code != 0


def main(base: Path) -> None:
    """Crash at every stage of saving step 2, over what steps 0 and 1 have left."""
    (base / "state").mkdir(parents=True)
    for step in (0, 1):  # two generations of the state
        save_step(base, step)
    stage, crashed = 0, True
    while crashed:
        folder = base.with_name(f"stage-{stage:02d}")
        shutil.copytree(base, folder, symlinks=True)
        crashed = crashes(folder, 2, lambda stage=stage, folder=folder: kill_at(stage, folder))  # type: ignore[misc]
        stage += 1
    for size in CUTS:
        folder = base.with_name(f"cut-{size:04d}")
        shutil.copytree(base, folder, symlinks=True)
        assert crashes(folder, 2, lambda size=size: cut_at(size))  # type: ignore[misc]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
