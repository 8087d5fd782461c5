"""The services: each opens a run, or the one from before, through its own library, and takes scalars.

Their settings are their own environment variables: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE, TRACKIO_DIR,
TRACKIO_SPACE_ID and the others. Imported in the process of a logger only.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from mlxdist.coordinator.loggers.scalars import STEP, Scalars

PROJECT = "mlxdist"


@dataclass(frozen=True)
class Opened:
    """A run as it is opened: its folder, its name and id at the service, its settings by dotted key."""

    folder: Path
    name: str
    id: str  # of the run at the service; the same after --resume
    again: bool  # it was opened by an earlier session
    settings: Mapping[str, Any]


class Service(Protocol):
    """An opened run at a service. Each method may fail, block or end the process: this is its library's process."""

    def log(self, scalars: Scalars) -> None:
        """Logs the values of one step."""

    def flush(self) -> None:
        """Writes out what was logged, where the library keeps it back."""

    def close(self, *, succeeded: bool) -> None:
        """Ends the run at the service."""


class TensorBoard:
    """Event files in the folder `tensorboard` of the run; a later session adds one of its own."""

    def __init__(self, run: Opened) -> None:
        from tensorboardX import SummaryWriter
        from tensorboardX.summary import hparams

        self._writer = SummaryWriter(str(run.folder / "tensorboard"))
        if not run.again:
            table = "".join(f"| {key} | `{value}` |\n" for key, value in run.settings.items())
            self._writer.add_text("settings", f"| key | value |\n|---|---|\n{table}")
            plain = {key: _plain(value) for key, value in run.settings.items()}
            for summary in hparams(plain, {"train/loss": 0, "eval/loss": 0}):
                self._writer.file_writer.add_summary(summary)

    def log(self, scalars: Scalars) -> None:
        """Adds the scalars with the time of their step."""
        for name, value in scalars.values.items():
            self._writer.add_scalar(name, value, scalars.step, walltime=scalars.seconds)

    def flush(self) -> None:
        """Writes the file."""
        self._writer.flush()

    def close(self, *, succeeded: bool) -> None:
        """Closes the file."""
        self._writer.close()


class WeightsAndBiases:
    """A run at W&B, or in the folder `wandb` of the run where it is offline (WANDB_MODE)."""

    def __init__(self, run: Opened) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", run.name),
            id=run.id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.settings),
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP, step_sync=True)

    def log(self, scalars: Scalars) -> None:
        """Logs the scalars; the step is one of them, and the axis of the charts."""
        self._run.log(scalars.with_step)

    def flush(self) -> None:
        """Does nothing: the library writes by itself."""

    def close(self, *, succeeded: bool) -> None:
        """Finishes the run."""
        self._run.finish(exit_code=0 if succeeded else 1)


class Trackio:
    """A run of trackio, in its own folder (TRACKIO_DIR) or in a Space (TRACKIO_SPACE_ID)."""

    def __init__(self, run: Opened) -> None:
        import trackio

        self._run: Any = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{run.name}-{run.id}",  # a run is known by its name, and other folders have runs of the same
            resume="allow",
            config=dict(run.settings),
            embed=False,
        )

    def log(self, scalars: Scalars) -> None:
        """Logs the scalars at their step."""
        self._run.log(scalars.with_step, step=scalars.step)

    def flush(self) -> None:
        """Does nothing: the library writes by itself."""

    def close(self, *, succeeded: bool) -> None:
        """Finishes the run."""
        self._run.finish()


SERVICES: Mapping[str, type[TensorBoard] | type[WeightsAndBiases] | type[Trackio]] = MappingProxyType(
    {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "trackio": Trackio}
)


def _plain(value: Any) -> str | int | float | bool:
    """Returns a value as TensorBoard's table of hyperparameters takes it."""
    return value if isinstance(value, str | int | float | bool) else str(value)
